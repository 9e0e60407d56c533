"""Carries out moves for one device: local copies, and byte messages between pairs of devices.

Both sides of a pair cut the same list of moves into the same messages, so nothing but bytes travels (D6.6). A message
of one contiguous box goes straight from and into the final tensor; others pass through a small staging buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

import torch

from nereus.core import DTYPE_BYTES, Kind, Move, TensorSpec, TransportError
from nereus.core.ports import Transport
from nereus.engine.groups import as_bytes
from nereus.engine.ledger import Ledger
from nereus.engine.packing import pack, unpack
from nereus.engine.positions import TORCH_DTYPES, Position, Shard, shards

LEAST_STAGING_BYTES, MOST_STAGING_BYTES = 1 << 14, 1 << 24


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that crossed the network on behalf of one device."""

    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What travels of a move in one message: its box, limited to `rows` of dim 0 when the box is cut further."""

    move: Move
    rows: tuple[int, int] | None
    bytes: int


Message = list[Piece]
Find = Callable[[Move], Position]


class Mover:
    """Moves boxes between the positions of this device and those of others.

    `dtypes` are the dtypes that travel, by kind; a side that stores another one converts.
    """

    def __init__(
        self,
        device: int,
        tensors: Sequence[TensorSpec],
        dtypes: Mapping[Kind, str],
        transport: Transport,
        ledger: Ledger,
    ) -> None:
        self._device = device
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        self._dtypes = dtypes
        self._transport = transport
        self._ledger = ledger
        self._staging_bytes = staging_bytes(tensors, dtypes)
        self._shards: dict[int, dict[str, Shard]] = {}

    def run(self, moves: Sequence[Move], source: Find, target: Find) -> Traffic:
        """Send and receive all that concerns this device; `source` and `target` find its positions for a move."""
        outgoing: dict[int, list[Move]] = {}
        incoming: dict[int, list[Move]] = {}
        for move in moves:
            for peer in move.targets:
                if move.source == self._device == peer:
                    piece = Piece(move, None, move.bytes)
                    self._view(target(move), piece).copy_(self._view(source(move), piece))
                elif move.source == self._device:
                    outgoing.setdefault(peer, []).append(move)
                elif peer == self._device:
                    incoming.setdefault(move.source, []).append(move)
        rounds = zip_longest(self._rounds(outgoing), self._rounds(incoming), fillvalue=())
        received_bytes = sent_bytes = 0
        for sends, receives in rounds:
            self._exchange(sends, receives, source, target)
            sent_bytes += sum(piece.bytes for _, message in sends for piece in message)
            received_bytes += sum(piece.bytes for _, message in receives for piece in message)
        return Traffic(received_bytes, sent_bytes)

    def _exchange(
        self,
        sends: Sequence[tuple[int, Message]],
        receives: Sequence[tuple[int, Message]],
        source: Find,
        target: Find,
    ) -> None:
        """One message at most to and from every peer."""
        out = [(peer, [self._view(source(piece.move), piece) for piece in message]) for peer, message in sends]
        inward = [(peer, message, [self._view(target(p.move), p) for p in message]) for peer, message in receives]
        packed = [(peer, self._pack(message, views)) for (peer, views), (_, message) in zip(out, sends, strict=True)]
        buffers = [(peer, self._landing(message, views)) for peer, message, views in inward]
        with self._ledger.hold("buckets", *(buffer for _, buffer in (*packed, *buffers))):
            self._transport.exchange(packed, buffers)
            for (_, message, views), (_, buffer) in zip(inward, buffers, strict=True):
                if not self._direct(message, views):
                    self._unpack(buffer, message, views)

    def _rounds(self, by_peer: Mapping[int, Sequence[Move]]) -> Iterator[tuple[tuple[int, Message], ...]]:
        """Message n of every peer travels in round n."""
        peers = sorted(by_peer)
        for messages in zip_longest(*(self._messages(by_peer[peer]) for peer in peers)):
            yield tuple((peer, message) for peer, message in zip(peers, messages, strict=True) if message)

    def _messages(self, moves: Sequence[Move]) -> Iterator[Message]:
        message: Message = []
        size = 0
        for piece in (piece for move in moves for piece in self._pieces(move)):
            if message and size + piece.bytes > self._staging_bytes:
                yield message
                message, size = [], 0
            message.append(piece)
            size += piece.bytes
        if message:
            yield message

    def _pieces(self, move: Move) -> Iterator[Piece]:
        """A large box of an inner dim is not contiguous: it is cut along dim 0 so that staging stays small."""
        shape, box = self._shapes[move.tensor], move.box
        rest = prod(size for dim, size in enumerate(shape) if dim not in (0, box.dim))
        width = box.stop - box.start
        row_bytes = rest * DTYPE_BYTES[self._dtypes[move.kind]] * (width if box.dim else 1)
        rows = shape[0] if box.dim else width
        limit = self._staging_bytes
        step = max(1, limit // row_bytes) if box.dim and row_bytes * rows > limit else rows
        for start in range(0, rows, max(1, step)):
            stop = min(rows, start + step)
            whole = (start, stop) == (0, rows)
            yield Piece(move, None if whole else (start, stop), row_bytes * (stop - start))

    def _view(self, position: Position, piece: Piece) -> torch.Tensor:
        """The part of a stored tensor that a piece names."""
        move = piece.move
        tensor, shard = position.tensors[move.tensor, move.kind], self._shards_of(position)[move.tensor]
        if not shard.start <= move.box.start < move.box.stop <= shard.stop:
            raise TransportError(
                f"device {self._device}: {move.tensor} {move.kind} [{move.box.start}, {move.box.stop}) is asked for, "
                f"{position.unit} holds [{shard.start}, {shard.stop})"
            )
        view = tensor.narrow(move.box.dim, move.box.start - shard.start, move.box.stop - move.box.start)
        return view if piece.rows is None else view[piece.rows[0] : piece.rows[1]]

    def _shards_of(self, position: Position) -> dict[str, Shard]:
        if id(position) not in self._shards:
            self._shards[id(position)] = shards(position.schema, position.unit, self._device)
        return self._shards[id(position)]

    def _dtype(self, piece: Piece) -> torch.dtype:
        return TORCH_DTYPES[self._dtypes[piece.move.kind]]

    def _direct(self, message: Message, views: Sequence[torch.Tensor]) -> bool:
        return len(views) == 1 and views[0].is_contiguous() and views[0].dtype == self._dtype(message[0])

    def _pack(self, message: Message, views: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._direct(message, views):
            return as_bytes(views[0])
        buffer = self._empty(message, views)
        pack(buffer, [view.to(self._dtype(piece)) for piece, view in zip(message, views, strict=True)])
        return buffer

    def _landing(self, message: Message, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where a message arrives: the final tensor itself, or a buffer."""
        return as_bytes(views[0]) if self._direct(message, views) else self._empty(message, views)

    def _empty(self, message: Message, views: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.empty(sum(piece.bytes for piece in message), dtype=torch.uint8, device=views[0].device)

    def _unpack(self, buffer: torch.Tensor, message: Message, views: Sequence[torch.Tensor]) -> None:
        unpack(buffer, views, [self._dtype(piece) for piece in message])


def staging_bytes(tensors: Iterable[TensorSpec], dtypes: Mapping[Kind, str]) -> int:
    """Largest message that is put together from several boxes, or from a box that is not contiguous.

    Both sides know it from the model's size: small beside the state, large enough that messages are few.
    """
    total = sum(tensor.elements for tensor in tensors) * sum(DTYPE_BYTES[dtype] for dtype in dtypes.values())
    return min(max(total // 256, LEAST_STAGING_BYTES), MOST_STAGING_BYTES)
