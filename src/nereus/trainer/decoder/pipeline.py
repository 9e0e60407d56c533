"""Micro-batches through the pp ranks of a unit: forward only, or 1F1B with gradients.

Sends are started and waited for one later, so that both directions flow; receives block. A pp rank that waits always
waits for work that does not depend on what it would do next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from nereus.trainer.decoder import outputs
from nereus.trainer.decoder.batch import MicroBatch
from nereus.trainer.decoder.gradients import Gradients, accumulating, complete
from nereus.trainer.decoder.model import Decoder
from nereus.trainer.decoder.parallel import Outbox

Loss = Callable[[Mapping[str, torch.Tensor], MicroBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""(outputs, micro-batch) to the loss summed over the micro-batch, and sums to report."""


def forward(
    decoder: Decoder, micro_batches: Sequence[MicroBatch], wanted: Sequence[str]
) -> list[dict[str, torch.Tensor]]:
    """The outputs of each micro-batch; empty off the last pp rank. No gradients."""
    found = []
    following = Outbox(decoder.pp, decoder.pp_rank + 1)
    with torch.inference_mode():
        for batch in micro_batches:
            with decoder.hooks.computing("forward"):
                x = _run(decoder, batch, receive_input(decoder, batch))
                if decoder.last:
                    found.append(outputs.compute(decoder, x, batch, wanted))
                else:
                    following.send(x)
            decoder.hooks.pace()
        following.flush()
    return found


def train(
    decoder: Decoder, micro_batches: Sequence[MicroBatch], wanted: Sequence[str], loss: Loss, scale: float
) -> tuple[Gradients, dict[str, float]]:
    """The gradient of scale × the summed loss of all micro-batches, complete within the unit, and summed statistics.

    Statistics come from the last pp rank (equal on its tp ranks); elsewhere they are empty.
    """
    sums: dict[str, torch.Tensor] = {}
    with accumulating(decoder) as gradients:
        schedule = _Schedule(decoder, wanted, loss, scale, sums)
        ahead = min(decoder.layout.pp - 1 - decoder.pp_rank, len(micro_batches))
        for batch in micro_batches[:ahead]:
            schedule.forward(batch)
        for batch in micro_batches[ahead:]:
            schedule.forward(batch)
            schedule.backward()
        for _ in range(ahead):
            schedule.backward()
        schedule.flush()
    with torch.no_grad():
        complete(decoder, gradients)
    return gradients, {name: value.item() for name, value in sums.items()}


class _InFlight(NamedTuple):
    """A micro-batch between its forward and its backward on one pp rank."""

    given: torch.Tensor | None
    made: torch.Tensor


class _Schedule:
    """The forward and backward halves of 1F1B on one pp rank."""

    def __init__(
        self, decoder: Decoder, wanted: Sequence[str], loss: Loss, scale: float, sums: dict[str, torch.Tensor]
    ) -> None:
        self._decoder = decoder
        self._wanted = wanted
        self._loss = loss
        self._scale = scale
        self._sums = sums
        self._in_flight: deque[_InFlight] = deque()
        self._following = Outbox(decoder.pp, decoder.pp_rank + 1)
        self._previous = Outbox(decoder.pp, decoder.pp_rank - 1)

    def forward(self, batch: MicroBatch) -> None:
        """Receive, compute, send on; the last pp rank computes the loss."""
        with self._decoder.hooks.computing("forward"):
            given = receive_input(self._decoder, batch)
            if given is not None:
                given.requires_grad_(True)
            made = _run(self._decoder, batch, given)
            if self._decoder.last:
                made, sums = self._loss(outputs.compute(self._decoder, made, batch, self._wanted), batch)
                made = made * self._scale
                for name, value in sums.items():
                    self._sums[name] = self._sums[name] + value.detach() if name in self._sums else value.detach()
            else:
                self._following.send(made.detach())
        self._in_flight.append(_InFlight(given, made))
        self._decoder.hooks.pace()

    def backward(self) -> None:
        """Receive the gradient of the oldest micro-batch in flight, go back through it, send on."""
        given, made = self._in_flight.popleft()
        with self._decoder.hooks.computing("backward"):
            gradient = None
            if not self._decoder.last:
                gradient = torch.empty_like(made)
                self._decoder.pp.recv(gradient, self._decoder.pp_rank + 1)
            torch.autograd.backward(made, gradient)
            if given is not None:
                self._previous.send(given.grad)
        self._decoder.hooks.pace()

    def flush(self) -> None:
        """Wait for the last sends."""
        self._following.flush()
        self._previous.flush()


def receive_input(decoder: Decoder, batch: MicroBatch) -> torch.Tensor | None:
    """What the previous pp rank made of the micro-batch; None on the first."""
    if decoder.first:
        return None
    x = torch.empty(*batch.tokens.shape, decoder.spec.hidden, dtype=decoder.dtype, device=decoder.device)
    decoder.pp.recv(x, decoder.pp_rank - 1)
    return x


def _run(decoder: Decoder, batch: MicroBatch, given: torch.Tensor | None) -> torch.Tensor:
    x = decoder.embed(batch.tokens) if given is None else given
    return decoder.blocks(x, *decoder.rotary.up_to(batch.tokens.shape[1]))
