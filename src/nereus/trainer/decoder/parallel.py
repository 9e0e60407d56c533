"""The parallel axes of a unit and the tensor-parallel operations that autograd goes through.

Everything here works on plain local tensors. An axis of size one never touches its group.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from nereus.engine.groups import Group, Handle


def _no_pace() -> None:
    pass


def _no_track(_name: str, _tensor: torch.Tensor) -> None:
    pass


def _not_measured(_name: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a worker wants to know while a decoder runs; nothing by default.

    `pace` is called after every forward or backward of a micro-batch and every decode step, `track` with large
    buffers (`gradients`, `logits`, `kv_cache`), and `communicating` surrounds every wait on the axis it names.
    """

    pace: Callable[[], None] = _no_pace
    track: Callable[[str, torch.Tensor], None] = _no_track
    communicating: Callable[[str], AbstractContextManager[None]] = _not_measured
    computing: Callable[[str], AbstractContextManager[None]] = _not_measured


@dataclass(frozen=True, slots=True)
class UnitGroups:
    """The groups of one position: its tp ranks (same pp rank) and its pp ranks (same tp rank). None: alone."""

    tp: Group | None = None
    pp: Group | None = None


class Axis:
    """One axis of a unit: its group with measured waits, or nothing when the degree is one."""

    def __init__(self, name: str, group: Group | None, hooks: Hooks) -> None:
        self.name = name
        self._group = group
        self._hooks = hooks
        self.rank = group.rank if group else 0
        self.size = group.size if group else 1

    @property
    def _peers(self) -> Group:
        if self._group is None:
            raise RuntimeError(f"the {self.name} axis has one rank and communicates with nobody")
        return self._group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the axis, in place."""
        if self.size > 1:
            with self._hooks.communicating(self.name):
                self._peers.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every rank, in rank order."""
        if self.size == 1:
            return [tensor]
        with self._hooks.communicating(self.name):
            return self._peers.all_gather(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite with the tensor of rank `root`."""
        if self.size > 1:
            with self._hooks.communicating(self.name):
                self._peers.broadcast(tensor, root)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Fill from rank `source`."""
        with self._hooks.communicating(self.name):
            self._peers.recv(tensor, source)

    def isend(self, tensor: torch.Tensor, to: int) -> Handle:
        """Start to send; the tensor must stay unchanged until the handle has been waited for."""
        with self._hooks.communicating(self.name):
            return self._peers.isend(tensor, to)

    def wait(self, handle: Handle) -> None:
        """Wait for a send that was started."""
        with self._hooks.communicating(self.name):
            handle.wait()

    def swap(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Send to `peer` and return what it sends, of the same shape."""
        received = torch.empty_like(tensor)
        with self._hooks.communicating(self.name):
            self._peers.exchange([(peer, tensor)], [(peer, received)])
        return received


class Outbox:
    """Sends to one peer, at most one under way."""

    def __init__(self, axis: Axis, peer: int) -> None:
        self._axis = axis
        self._peer = peer
        self._handle: Handle | None = None
        self._tensor: torch.Tensor | None = None

    def send(self, tensor: torch.Tensor) -> None:
        """Start to send, after the send before has ended."""
        self.flush()
        self._tensor = tensor.contiguous()
        self._handle = self._axis.isend(self._tensor, self._peer)

    def flush(self) -> None:
        """Wait for the send under way."""
        if self._handle is not None:
            self._axis.wait(self._handle)
        self._handle = self._tensor = None


class _Enter(torch.autograd.Function):
    """Identity whose gradient is summed over the axis."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        ctx.axis.all_reduce(gradient)
        return gradient, None


class _Leave(torch.autograd.Function):
    """Sum over the axis, in place; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        axis.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def enter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Where a replicated activation goes into column-parallel linears."""
    return x if axis.size == 1 else _Enter.apply(x, axis)


def leave(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Where the partial sums of a row-parallel linear become a replicated activation; overwrites `x`."""
    return x if axis.size == 1 else _Leave.apply(x, axis)
