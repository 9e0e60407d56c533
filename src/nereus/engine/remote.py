"""A position of another process of this host: where its tensors lie there, and what this process reads of them.

A source takes no part: whoever knows its unit and schema knows how its tensors are cut, and is told their addresses.
They must stay where they are, and as they are, until all who read have said that they did.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from nereus.core import EMU, Box, Kind, Move, StateSchema, TransportError
from nereus.engine.messages import Part
from nereus.engine.positions import TORCH_DTYPES, Shard, shards
from nereus.engine.reading import SCRATCH_BYTES, pull, readable, scratch_bytes, tiny_pieces
from nereus.engine.transports.attach import Process
from nereus.transition.flows import Flow


class Remote:
    """What a device holds of a unit. `addresses` are those of the tensors, of each that is held its kinds in order."""

    def __init__(
        self, schema: StateSchema, unit: EMU, device: int, process: Process, addresses: NDArray[np.int64]
    ) -> None:
        self.process = process
        self._unit, self._schema = unit, schema
        self._held = shards(schema, unit, device)
        names = [(name, kind) for name in self._held for kind in schema.dtypes]
        self._addresses = dict(zip(names, addresses.tolist(), strict=True))

    def offer(self, move: Move) -> list[int]:
        """Address and strides of each part in which a move is read."""
        shard, box = self._held[move.tensor], move.box
        if not shard.start <= box.start < box.stop <= shard.stop:
            raise TransportError(
                f"{move.tensor} {move.kind} [{box.start}, {box.stop}) is to be read, "
                f"{self._unit} holds [{shard.start}, {shard.stop}) there"
            )
        view = shard.part(_like(self._schema, move.kind, shard), move.box)
        told: list[int] = []
        for part in readable([Part(view, view.dtype)]):
            offset_bytes = part.view.storage_offset() * view.element_size()
            told += (self._addresses[move.tensor, move.kind] + offset_bytes, *part.view.stride())
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

    @property
    def scratch_bytes(self) -> int:
        """Of the scratch buffer that it needs."""
        return scratch_bytes(self.parts, SCRATCH_BYTES)

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
    tensor = flow.tensors[0]
    shard = shards(schema, unit, flow.source)[tensor.name]
    box = Box(tensor.cut.dim or 0, flow.start, flow.stop)
    each = (tiny_pieces(shard.part(_like(schema, kind, shard), box)) for kind in schema.dtypes)
    return len(flow.tensors) * sum(each)


def _like(schema: StateSchema, kind: Kind, shard: Shard) -> torch.Tensor:
    """A tensor without memory, laid out as the shard."""
    return torch.empty(shard.shape, dtype=TORCH_DTYPES[schema.dtypes[kind]], device="meta")
