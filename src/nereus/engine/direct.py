"""State that a rank reads straight from the memory of its peer, where both are processes of one host.

Owns who may read whom in a group, and one exchange's part of it: a source offers the places of what it would send, the
target reads them into its own tensors and says when it is done; until then the source's memory stays as it is. A target
that says nothing by the deadline is an error of the source, and what it has read then counts for nothing. Nothing is
said where the caller keeps sources as they are until every rank has ended its part anyhow. Of another dtype than the
one that travels, the target reads what is stored, where it knows that dtype, and converts it. What a source cannot
offer (it converts itself, it is not in the memory of the host, its pieces are tiny) travels as messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from nereus.core import NereusError, TransportError
from nereus.engine.messages import Part, Parts, limited
from nereus.engine.transports.attach import (
    CARD_BYTES,
    MOST_CALL_BYTES,
    Process,
    Segments,
    alike,
    card,
    find,
    runs,
    segments,
)

if TYPE_CHECKING:
    from nereus.engine.groups import Handle
    from nereus.engine.transports.torch import Torch

Note = Callable[[NereusError], None]
Numbers = NDArray[np.int64]
LEAST_RUN_BYTES = 256
"""Smaller pieces cost more one by one than what is packed and sent."""
FEW_PIECES = 64
"""So many of them cost nothing to speak of in one part."""
BATCH_PIECES = 1 << 15
"""So many are listed at once: a megabyte."""
SCRATCH_BYTES = 1 << 19
"""What is converted or in tiny pieces is read so many bytes at once, which stay in the cache until they are copied."""
MOST_PIECES = 4096
"""So many of them a source offers to one rank: a millisecond or two."""


class Neighbours:
    """Who of a group may read whose memory; found out once for each pair, the same on both of its sides."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self.cards: Sequence[bytes] | None = None
        """By rank, where somebody else has told them."""
        self.readers: dict[int, bool] = {}
        """Rank → whether it reads from this one."""
        self.sources: dict[int, Process | None] = {}
        """Rank → its process where this one reads from it."""

    @property
    def card(self) -> bytes:
        """This process's own."""
        return card() if self._enabled else bytes(CARD_BYTES)

    def try_cards(self, sources: Collection[int]) -> frozenset[int]:
        """Those that can be read, found out from their cards alone: somebody else tells them so, before they send."""
        for source in sorted(set(sources) - self.sources.keys()):
            self.sources[source] = find(self.cards[source]) if self._enabled and self.cards is not None else None
        return frozenset(source for source in sources if self.sources[source] is not None)

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
        self._sends = {rank: cut for rank, parts in sends.items() if (cut := _cut(parts))}
        self._receives = {rank: cut for rank, parts in receives.items() if (cut := _cut(parts))}
        received = (part for parts in self._receives.values() for part in parts)
        staged = max((part.view.numel() * _item_bytes(part) for part in received if _staged(part)), default=0)
        self.scratch_bytes = min(staged, room_bytes, SCRATCH_BYTES)
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
        offers = {rank: _offer(parts) for rank, parts in self._sends.items() if neighbours.readers.get(rank)}
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
        process, parts = self._sources[rank], self._receives[rank]
        batch: list[tuple[Segments, Segments]] = []
        listed = 0
        try:
            for part, (address, strides) in zip(parts, _offered(self._offers[rank], parts), strict=True):
                if _staged(part):
                    self._convert(process, part, address, strides)
                    continue
                there = segments(address, tuple(part.view.shape), strides, part.dtype.itemsize)
                batch.append(alike(_places(part.view), there))
                listed += len(batch[-1][0])
                if listed >= BATCH_PIECES:
                    _read(process, batch)
                    listed = 0
            _read(process, batch)
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

    def _convert(self, process: Process, part: Part, address: int, strides: tuple[int, ...]) -> None:
        """By way of the scratch buffer, as much at once as it takes."""
        stored = part.stored or part.dtype
        limit = self._scratch.numel() // _item_bytes(part) * part.dtype.itemsize
        like = replace(part, view=torch.empty_strided(part.view.shape, strides, dtype=stored, device="meta"))
        for mine, theirs in zip(limited(part, limit), limited(like, limit), strict=True):
            view, shape = theirs.view, tuple(theirs.view.shape)
            start = address + view.storage_offset() * stored.itemsize
            read = self._scratch[: view.numel() * stored.itemsize].view(stored).view(shape)
            process.read(*alike(_places(read), segments(start, shape, view.stride(), stored.itemsize)))
            mine.view.copy_(read.to(part.dtype) if mine.view.dtype != part.dtype else read)


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


def _read(process: Process, batch: list[tuple[Segments, Segments]]) -> None:
    """What is listed, which is none afterwards."""
    if batch:
        process.read(*(np.concatenate(side) for side in zip(*batch, strict=True)))
    batch.clear()


def _cut(parts: Parts) -> list[Part]:
    """No part is more than one call reads."""
    whole = [(part, MOST_CALL_BYTES // _item_bytes(part) * part.dtype.itemsize) for part in parts if part.view.numel()]
    return [small for part, limit in whole for small in limited(part, limit)]


def _item_bytes(part: Part) -> int:
    """Of an element where that is widest: as it is stored by the source, or as it travels."""
    travels, stored = part.dtype, part.stored or part.dtype
    return int(max(travels.itemsize, stored.itemsize))


def _pieces(view: torch.Tensor, dtype: torch.dtype) -> tuple[int, int] | None:
    """(pieces, bytes of each) of a view in this process's memory; None where that does not hold elements of `dtype`."""
    if view.device.type != "cpu" or view.dtype != dtype or view.is_conj() or view.is_neg():
        return None
    return runs(tuple(view.shape), view.stride(), view.element_size())


def _tiny(count: int, size_bytes: int) -> int:
    """How many small pieces."""
    return count if size_bytes < LEAST_RUN_BYTES else 0


def _staged(part: Part) -> bool:
    """Whether a part is read by way of the scratch buffer."""
    found = _pieces(part.view, part.dtype) if part.stored in (None, part.dtype) else None
    return found is None or _tiny(*found) > FEW_PIECES


def _places(view: torch.Tensor) -> Segments:
    return segments(view.data_ptr(), tuple(view.shape), view.stride(), view.element_size())


def _offer(parts: Parts) -> Numbers:
    """Address and strides of each part; zeros where they cannot be read as they are."""
    told = np.array([number for part in parts for number in (part.view.data_ptr(), *part.view.stride())], np.int64)
    found = [_pieces(part.view, part.stored or part.dtype) for part in parts]
    pieces = sum(MOST_PIECES + 1 if each is None else _tiny(*each) for each in found)
    return told if pieces <= MOST_PIECES else np.zeros_like(told)


def _offered(told: Numbers, parts: Parts) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Address and strides of the other side's views, which have the shapes of ours."""
    start = 0
    for part in parts:
        address, *strides = told[start : start + 1 + part.view.dim()].tolist()
        yield address, tuple(strides)
        start += 1 + part.view.dim()
