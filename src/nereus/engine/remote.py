"""A position of another process of this host: where its tensors lie there, and what this process reads of them.

A source takes no part: whoever knows its unit and schema knows how its tensors are cut, and is told their addresses.
They must stay where they are, and as they are, until all who read have said that they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from nereus.core import DTYPE_BYTES, EMU, Move, StateSchema, TransportError
from nereus.engine.messages import Part
from nereus.engine.positions import TORCH_DTYPES, shards
from nereus.engine.reading import pull, readable, scratch_bytes, tiny
from nereus.engine.transports.attach import MOST_CALL_BYTES, Process, runs
from nereus.transition.flows import Flow


class Remote:
    """What a device holds of a unit. `addresses` are those of the tensors, of each that is held its kinds in order."""

    def __init__(
        self, schema: StateSchema, unit: EMU, device: int, process: Process, addresses: NDArray[np.int64]
    ) -> None:
        self.process = process
        self._unit = unit
        self._dtypes = {kind: TORCH_DTYPES[dtype] for kind, dtype in schema.dtypes.items()}
        self._held = {name: (shard, _strides(shard.shape)) for name, shard in shards(schema, unit, device).items()}
        names = [(name, kind) for name in self._held for kind in schema.dtypes]
        self._addresses = dict(zip(names, addresses.tolist(), strict=True))

    def offer(self, move: Move) -> list[int]:
        """Address and strides of each part in which a move is read."""
        (shard, strides), box, dtype = self._held[move.tensor], move.box, self._dtypes[move.kind]
        if not shard.start <= box.start < box.stop <= shard.stop:
            raise TransportError(
                f"{move.tensor} {move.kind} [{box.start}, {box.stop}) is to be read, "
                f"{self._unit} holds [{shard.start}, {shard.stop}) there"
            )
        address = self._addresses[move.tensor, move.kind]
        if move.bytes <= MOST_CALL_BYTES:
            start = (box.start - shard.start) * strides[box.dim] if strides else 0
            return [address + start * dtype.itemsize, *strides]
        told: list[int] = []
        for part in readable([Part(shard.part(torch.empty(shard.shape, dtype=dtype, device="meta"), box), dtype)]):
            told += (address + part.view.storage_offset() * dtype.itemsize, *strides)
        return told


@dataclass(slots=True)
class Reading:
    """What one device reads from another, in the order in which it was added."""

    device: int
    remote: Remote
    parts: list[Part] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(part.bytes for part in self.parts)

    def scratch_bytes(self, room_bytes: int) -> int:
        """Of the scratch buffer that it needs, at most `room_bytes`."""
        return scratch_bytes(self.parts, room_bytes)

    def add(self, move: Move, part: Part) -> None:
        """Fill `part` with what the other device holds of a move."""
        self.parts += readable([part])
        self.offered += self.remote.offer(move)

    def run(self, scratch: torch.Tensor) -> None:
        """Read everything. Raises TransportError."""
        try:
            pull(self.remote.process, self.parts, np.array(self.offered, np.int64), scratch)
        except TransportError as error:
            raise TransportError(f"reading from device {self.device} failed: {error}") from None


def tiny_pieces_of(schema: StateSchema, unit: EMU, flow: Flow) -> int:
    """In how many small pieces what a flow moves lies at its source, which holds a position of `unit`."""
    tensor, (_, rank) = flow.tensors[0], unit.position(flow.source)
    if not tensor.cut.dim:  # rows lie side by side
        return 0
    dim, shape = tensor.cut.dim, list(tensor.local_shape(unit.layout.tp, rank))
    strides = _strides(shape)
    shape[dim] = flow.stop - flow.start
    each = (tiny(*runs(tuple(shape), strides, DTYPE_BYTES[dtype])) for dtype in schema.dtypes.values())
    return len(flow.tensors) * sum(each)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
