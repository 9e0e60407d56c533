"""State that a rank reads straight from the memory of its peer, where both are processes of one host.

Owns who may read whom in a group, and one exchange's part of it: a source offers the places of what it would send, the
target reads them into its own tensors and says when it is done; until then the source's memory stays as it is. A target
that says nothing by the deadline is an error of the source, and what it has read then counts for nothing. Nothing is
said where the caller keeps sources as they are until every rank has ended its part anyhow. Of another dtype than the
one that travels, the target reads what is stored, where it knows that dtype, and converts it. What a source cannot
offer (it converts itself, it is not in the memory of the host, its pieces are tiny) travels as messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from nereus.core import NereusError, TransportError
from nereus.engine.messages import Parts
from nereus.engine.reading import Numbers, offer, pull, readable, scratch_bytes
from nereus.engine.transports.attach import CARD_BYTES, Process, card, find

if TYPE_CHECKING:
    from nereus.engine.groups import Handle
    from nereus.engine.transports.torch import Torch

Note = Callable[[NereusError], None]


class Neighbours:
    """Who of a group may read whose memory; found out once for each pair, the same on both of its sides."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self.readers: dict[int, bool] = {}
        """Rank → whether it reads from this one."""
        self.sources: dict[int, Process | None] = {}
        """Rank → its process where this one reads from it."""

    @property
    def card(self) -> bytes:
        """This process's own."""
        return card() if self._enabled else bytes(CARD_BYTES)

    def meet(self, transport: Torch, targets: Collection[int], sources: Collection[int], note: Note) -> None:
        """A source shows its card, the target tries it and answers; those that have met are left out.

        Errors of a peer go to `note`; the pair then has messages, as has every pair on CUDA.
        """
        new_targets = sorted(set(targets) - self.readers.keys())
        new_sources = sorted(set(sources) - self.sources.keys())
        if transport.device.type != "cpu" or not (new_targets or new_sources):
            return
        cards = _Letters(transport, dict.fromkeys(new_targets, self.card), dict.fromkeys(new_sources, CARD_BYTES), note)
        verdicts = _Letters(transport, {}, dict.fromkeys(new_targets, 1), note)
        for source in new_sources:
            told = cards.take(source, "its card")
            self.sources[source] = find(told) if self._enabled and told is not None else None
            verdicts.send(source, bytes([self.sources[source] is not None]))
        for target in new_targets:
            self.readers[target] = verdicts.take(target, "whether it reads memory") == b"\1"
        cards.end("cards")
        verdicts.end("answers to cards")


class Direct:
    """One rank's part of one exchange, as far as pairs that read are concerned."""

    def __init__(
        self,
        transport: Torch,
        sends: Mapping[int, Parts],
        receives: Mapping[int, Parts],
        room_bytes: int,
        note: Note,
        kept: bool = False,
    ) -> None:
        """The scratch buffer takes at most `room_bytes`. `kept`: sources stay until every rank has ended its part."""
        self._transport, self._note, self._kept = transport, note, kept
        self._sends = {rank: cut for rank, parts in sends.items() if (cut := readable(parts))}
        self._receives = {rank: cut for rank, parts in receives.items() if (cut := readable(parts))}
        self.scratch_bytes = scratch_bytes([part for parts in self._receives.values() for part in parts], room_bytes)
        """For what cannot be read into a tensor itself."""
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._sources: dict[int, Process] = {}
        self._offers: dict[int, Numbers] = {}
        self._done: _Letters | None = None
        self.read_by: frozenset[int] = frozenset()
        """Ranks that read what would be sent to them."""

    @property
    def read_from(self) -> frozenset[int]:
        """Ranks whose memory is read."""
        return frozenset(self._offers)

    def allocate(self) -> torch.Tensor:
        """The scratch buffer, which is there until it is released."""
        if self._scratch.numel() != self.scratch_bytes:
            self._scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8)
        return self._scratch

    def release(self) -> None:
        """Let go of the scratch buffer."""
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def open(self) -> None:
        """Meet whom this rank has not met, and exchange offers."""
        neighbours = self._transport.neighbours
        self._offers, self._done = {}, None
        if neighbours is None:
            return
        neighbours.meet(self._transport, self._sends.keys(), self._receives.keys(), self._note)
        met = neighbours.sources
        self._sources = {rank: found for rank in self._receives if (found := met.get(rank)) is not None}
        offers = {rank: offer(parts) for rank, parts in self._sends.items() if neighbours.readers.get(rank)}
        sizes = {rank: 8 * sum(1 + part.view.dim() for part in self._receives[rank]) for rank in self._sources}
        letters = _Letters(self._transport, {rank: told.tobytes() for rank, told in offers.items()}, sizes, self._note)
        for rank in self._sources:
            told = letters.take(rank, "its offer")
            if told is not None and any(told):
                self._offers[rank] = np.frombuffer(told, np.int64)
        letters.end("offers")
        self.read_by = frozenset(rank for rank, told in offers.items() if told.any())

    def pull(self, rank: int) -> None:
        """Read everything from one rank. Raises TransportError."""
        try:
            pull(self._sources[rank], self._receives[rank], self._offers[rank], self._scratch)
        except TransportError as error:
            raise TransportError(f"reading from rank {rank} failed: {error}") from None

    def tell(self) -> None:
        """Let the sources know that their memory is not needed any more; after every message of the exchange.

        Messages of a pair match in the order both sides post them.
        """
        if self._kept:
            return
        self._done = _Letters(
            self._transport, dict.fromkeys(self._offers, b"\1"), dict.fromkeys(self.read_by, 1), self._note
        )

    def close(self) -> None:
        """Wait until all who read have said so."""
        if self._done is None:
            return
        for rank in sorted(self.read_by):
            self._done.take(rank, "that it has read")
        self._done.end("that state was read")


class _Letters:
    """Small messages: all are under way at once, and whose does not arrive is noted."""

    def __init__(self, transport: Torch, sends: Mapping[int, bytes], sizes: Mapping[int, int], note: Note) -> None:
        self._transport, self._note = transport, note
        self._sent: list[Handle] = []
        self._inward: dict[int, tuple[torch.Tensor, list[Handle]]] = {}
        for rank, size in sizes.items():
            buffer = torch.zeros(size, dtype=torch.uint8)
            handles, errors = transport.post([], [(rank, buffer)])
            self._inward[rank] = buffer, handles
            self._heard(errors)
        for rank, data in sends.items():
            self.send(rank, data)

    def send(self, rank: int, data: bytes) -> None:
        """Start to send."""
        handles, errors = self._transport.post([(rank, torch.frombuffer(bytearray(data), dtype=torch.uint8))], [])
        self._sent += handles
        self._heard(errors)

    def take(self, rank: int, what: str) -> bytes | None:
        """What a rank has sent; None where it did not."""
        buffer, handles = self._inward[rank]
        if buffer.numel() and not handles:
            return None
        whole = [self._wait(handle, f"hearing from rank {rank} {what}") for handle in handles]
        return buffer.numpy().tobytes() if all(whole) else None

    def end(self, what: str) -> None:
        """Wait until all has been sent."""
        for handle in self._sent:
            self._wait(handle, f"telling {what}")
        self._sent.clear()

    def _wait(self, handle: Handle, what: str) -> bool:
        try:
            self._transport.wait(handle, what)
        except NereusError as error:
            self._note(error)
            return False
        return True

    def _heard(self, errors: list[NereusError]) -> None:
        for error in errors:
            self._note(error)
