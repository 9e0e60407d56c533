"""Moves views of tensors between this rank and its peers: read from a peer's memory where that is possible, else sent.

Owns the order of rounds and the two staging buffers, one for what is sent and one for what is received. A message of
one contiguous view goes straight from and into the tensor, others are packed; many are in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from nereus.core import NereusError, TransportError
from nereus.engine.direct import Direct
from nereus.engine.groups import as_bytes
from nereus.engine.messages import Addressed, Message, Parts, Round, rounds
from nereus.engine.packing import pack, unpack
from nereus.engine.ring import Ring, padded
from nereus.engine.side_stream import beside
from nereus.engine.transports.torch import Torch

MOST_ROUNDS = 64
"""Rounds under way at once, where staging memory does not bound them."""


@dataclass(slots=True)
class _Open:
    """A round under way."""

    handles: list[Any]
    receives: list[tuple[int, torch.Tensor, Message]]
    staged: tuple[int, int]
    whole: bool = True


class Exchange:
    """One rank's part of an exchange, which may be run again as long as all views stay where they are.

    `note` hears of errors; where it returns, peers get all their messages anyhow.
    `limit` bounds bundles and must be the same on every rank (`bundle_bytes`); each of the two staging buffers takes
    at most `bucket_bytes`, or one round where that is more. Ranks are those of the transport. Where what is sent is
    `kept` as it is until every rank has run, nobody waits for those who read it.
    """

    def __init__(
        self,
        transport: Torch,
        sends: Mapping[int, Parts],
        receives: Mapping[int, Parts],
        limit: int,
        bucket_bytes: int,
        note: Callable[[NereusError], None],
        kept: bool = False,
    ) -> None:
        self._transport = transport
        self._note = note
        self._direct = Direct(transport, sends, receives, max(limit, bucket_bytes), note, kept)
        self._sends, self._receives = sends, receives
        self._limit, self._bucket_bytes = limit, bucket_bytes
        self._opened = False
        self._rounds: list[Round] = []
        self._left_out: tuple[frozenset[int], frozenset[int]] | None = None
        """Ranks whose sends and receives are in no round; None before there are rounds."""
        self._rings: tuple[Ring, ...] = ()

    def open(self) -> None:
        """Meet the peers of the next run: what is read needs no rounds, and no staging buffers."""
        self._direct.open()
        self._opened = True

    def allocate(self) -> tuple[torch.Tensor, ...]:
        """The staging buffers, which the next run lets go of; for every pair where the peers have not been met."""
        if not self._rings:
            self._list()
            staged = [self._staged_bytes(one) for one in self._rounds]
            pinned = self._transport.device.type == "cpu" and any(view.is_cuda for view in self._views())
            device, most = self._transport.device, self._bucket_bytes
            self._rings = tuple(Ring([each[side] for each in staged], most, device, pinned) for side in (0, 1))
        return (*(ring.buffer for ring in self._rings), self._direct.allocate())

    def run(self, meanwhile: Callable[[], None], touched: Iterable[torch.Tensor] = ()) -> None:
        """Send and receive everything; `meanwhile` runs once while messages are under way, and works on `touched`."""
        self.allocate()
        try:
            with beside(self._transport.device, chain(self._used(), touched), lambda: self._transport.left_s):
                self._run(meanwhile)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the staging buffers; the next run opens anew."""
        self._opened, self._rings = False, ()
        self._direct.release()

    def _list(self) -> None:
        """The rounds, without the pairs that are known to read."""
        left_out = (self._direct.read_by, self._direct.read_from) if self._opened else (frozenset[int](), frozenset())
        if self._left_out != left_out:
            sides = zip((self._sends, self._receives), left_out, strict=True)
            sends, receives = ({rank: side[rank] for rank in side if rank not in out} for side, out in sides)
            self._rounds, self._left_out = rounds(sends, receives, self._limit), left_out

    def _views(self) -> Iterator[torch.Tensor]:
        """What the rounds read and write."""
        for one in self._rounds:
            yield from (part.view for _, message in (*one.sends, *one.receives) for part in message.parts)

    def _used(self) -> Iterator[torch.Tensor]:
        """What is read and written, the staging buffers too."""
        yield from self.allocate()
        yield from self._views()

    def _run(self, meanwhile: Callable[[], None]) -> None:
        if not self._opened:
            self.open()
        under_way: deque[_Open] = deque()
        waiting: Callable[[], None] | None = partial(self._local, meanwhile)
        for one in self._sent():
            staged = self._staged_bytes(one)
            while under_way and not self._may_start(len(under_way), staged):
                self._act(waiting)
                waiting = None
                self._finish(under_way.popleft())
            under_way.append(self._start(one, staged))
        self._act(waiting)
        self._direct.tell()
        while under_way:
            self._finish(under_way.popleft())
        self._direct.close()

    def _sent(self) -> Iterator[Round]:
        """What travels as messages: all of a pair or nothing, so that both of its sides leave out the same."""
        by, of = self._direct.read_by, self._direct.read_from
        for one in self._rounds:
            sends = tuple(each for each in one.sends if each[0] not in by)
            receives = tuple(each for each in one.receives if each[0] not in of)
            if sends or receives:
                yield Round(sends, receives)

    def _local(self, meanwhile: Callable[[], None]) -> None:
        """What this rank does by itself."""
        self._act(meanwhile)
        for rank in sorted(self._direct.read_from):
            self._act(partial(self._direct.pull, rank))

    def _may_start(self, under_way: int, staged: tuple[int, int]) -> bool:
        room = all(ring.has_room(size) for ring, size in zip(self._rings, staged, strict=True))
        return under_way < MOST_ROUNDS and room

    def _act(self, action: Callable[[], None] | None) -> None:
        """A local action, if it has not been done; its error is one of this rank's own."""
        try:
            if action is not None:
                action()
        except NereusError as error:
            self._note(error)
        except (RuntimeError, ValueError, MemoryError) as error:
            self._note(TransportError(f"{type(error).__name__}: {error}"))

    def _start(self, one: Round, staged: tuple[int, int]) -> _Open:
        """Receives first, then each message as soon as it is packed; on CUDA all as one batch."""
        out, inward = (ring.take(size) for ring, size in zip(self._rings, staged, strict=True))
        opened = _Open([], self._place(one.receives, inward), staged)
        receives = [(peer, buffer) for peer, buffer, _ in opened.receives]
        batched = self._transport.device.type == "cuda"
        sends: list[tuple[int, torch.Tensor]] = []
        if not batched:
            self._post(opened, [], receives)
        for peer, buffer, message in self._place(one.sends, out):
            if not self._as_it_is(message):
                self._act(partial(_pack, buffer, message))
            if batched:
                sends.append((peer, buffer))
            else:
                self._post(opened, [(peer, buffer)], [])
        if batched:
            self._post(opened, sends, receives)
        return opened

    def _post(
        self, opened: _Open, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]
    ) -> None:
        handles, errors = self._transport.post(sends, receives)
        opened.handles += handles
        opened.whole = opened.whole and not errors
        for error in errors:
            self._note(error)

    def _finish(self, opened: _Open) -> None:
        for handle in opened.handles:
            try:
                self._transport.wait(handle, "moving state")
            except NereusError as error:
                opened.whole = False
                self._note(error)
        for _, buffer, message in opened.receives:
            if opened.whole and not self._as_it_is(message):
                self._act(partial(_unpack, buffer, message))
        for ring, size in zip(self._rings, opened.staged, strict=True):
            ring.give_back(size)

    def _as_it_is(self, message: Message) -> bool:
        """Whether a message needs no copy: one plain view where the transport can reach it."""
        first = message.parts[0]
        return len(message.parts) == 1 and first.plain and first.view.device.type == self._transport.device.type

    def _staged_bytes(self, one: Round) -> tuple[int, int]:
        """Of what is sent, and of what is received."""
        out, inward = (
            sum(padded(message.bytes) for _, message in messages if not self._as_it_is(message))
            for messages in (one.sends, one.receives)
        )
        return out, inward

    def _place(self, messages: Addressed, arena: torch.Tensor) -> list[tuple[int, torch.Tensor, Message]]:
        """The bytes of each message: the tensor itself, or the next part of `arena`."""
        found: list[tuple[int, torch.Tensor, Message]] = []
        start = 0
        for peer, message in messages:
            if self._as_it_is(message):
                found.append((peer, as_bytes(message.parts[0].view), message))
            else:
                found.append((peer, arena[start : start + message.bytes], message))
                start += padded(message.bytes)
        return found


def _pack(buffer: torch.Tensor, message: Message) -> None:
    pack(buffer, [part.view.to(part.dtype) for part in message.parts])


def _unpack(buffer: torch.Tensor, message: Message) -> None:
    unpack(buffer, [part.view for part in message.parts], [part.dtype for part in message.parts])
