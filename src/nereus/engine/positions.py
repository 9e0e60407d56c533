"""The positions one device holds: live, pending until their commit group commits, and old until they are destroyed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from nereus.core import EMU, Box, Kind, LogicalState, ModelStage, OutOfMemoryError, StateSchema, TransitionError
from nereus.engine.ledger import Hold, Ledger

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
}


Tensors = dict[tuple[str, Kind], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shard:
    """The range [start, stop) of `dim` of a logical tensor, stored as `shape` (trailing padding included)."""

    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Stored elements."""
        return prod(self.shape)

    def part(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """The part of a stored tensor that a box inside of this range names."""
        if not tensor.dim():  # one element, always whole
            return tensor
        return tensor.narrow(box.dim, box.start - self.start, box.stop - box.start)


@dataclass(slots=True)
class Position:
    """What one device holds of one unit: local shards keyed by the logical tensor's name and kind, and counters."""

    unit: EMU
    schema: StateSchema
    tensors: dict[tuple[str, Kind], torch.Tensor]
    logical: LogicalState = field(default_factory=LogicalState)
    staged: bool = False
    """Whether its tensors lie in host memory for the rest of a transition."""
    held: Mapping[str, Shard] = field(default_factory=dict)
    """Tensor → which range of it they store."""

    def addresses(self, held: Mapping[str, Shard], dtypes: Mapping[Kind, str]) -> NDArray[np.int64] | None:
        """Where each tensor lies in this process's memory: of each of `held`, its kinds in order.

        None where one is not laid out there as others will think, who know `held` and `dtypes` alone.
        """
        found = []
        for name, shard in held.items():
            for kind, dtype in dtypes.items():
                tensor = self.tensors.get((name, kind))
                if tensor is None or self.held.get(name) != shard:
                    return None
                plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
                alike = tensor.dtype == TORCH_DTYPES[dtype] and tuple(tensor.shape) == tuple(shard.shape)
                if tensor.device.type != "cpu" or not (plain and alike):
                    return None
                found.append(tensor.data_ptr())
        return np.array(found, np.int64)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its shards, padding included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class Positions:
    """The positions of one worker, counted by its ledger. At most one live position per model-stage.

    `host` counts the positions that lie in host memory.
    """

    def __init__(self, device: int, ledger: Ledger, torch_device: torch.device) -> None:
        self._device = device
        self._ledger = ledger
        self.host = Ledger(device)
        self._torch_device = torch_device
        self._live: dict[ModelStage, Position] = {}
        self._pending: dict[tuple[str, EMU], Position] = {}
        self._old: list[Position] = []
        self._holds: dict[int, Hold] = {}

    def __iter__(self) -> Iterator[Position]:
        return iter(tuple(self._live.values()))

    def __contains__(self, model_stage: ModelStage) -> bool:
        return model_stage in self._live

    def __getitem__(self, model_stage: ModelStage) -> Position:
        """The live position of a model-stage."""
        if model_stage not in self._live:
            held = ", ".join(map(str, self._live)) or "none"
            raise TransitionError(f"device {self._device} holds no position of {model_stage}, it holds: {held}")
        return self._live[model_stage]

    def create(self, unit: EMU, schema: StateSchema) -> Position:
        """A live position filled with zeros, for a job that starts."""
        if unit.model_stage in self._live:
            raise TransitionError(f"device {self._device} already holds {self._live[unit.model_stage].unit}")
        position = self._allocate(unit, schema)
        for tensor in position.tensors.values():
            tensor.zero_()
        self._live[unit.model_stage] = position
        return position

    def prepare(
        self, group: str, unit: EMU, schema: StateSchema, base: Position | None, shared: Collection[str]
    ) -> Position:
        """A pending position of a goal unit. It takes the tensors named `shared` over from `base`, as they are.

        Of the others padding alone is written; the elements are the caller's to fill.
        """
        position = self._allocate(unit, schema, base, shared)
        self._pending[group, unit] = position
        return position

    def pending(self, group: str, unit: EMU) -> Position | None:
        """The pending position of a goal unit, if it has been prepared."""
        return self._pending.get((group, unit))

    def commit(self, group: str) -> None:
        """Make the pending positions of a commit group live; those they replace become old. Idempotent."""
        for key in [key for key in self._pending if key[0] == group]:
            position = self._pending.pop(key)
            replaced = self._live.get(position.unit.model_stage)
            if replaced is not None:
                self._old.append(replaced)
            self._live[position.unit.model_stage] = position

    def abort(self) -> None:
        """Let go of everything that has not been committed."""
        for position in self._pending.values():
            self._release(position)
        self._pending.clear()

    def destroy(self, unit: EMU) -> bool:
        """Let go of the position of a unit, old or live. False when there is none.

        The position that a live one had replaced is live again: the new unit did not become whole.
        """
        for position in self._old:
            if position.unit == unit:
                self._old = [other for other in self._old if other is not position]
                self._release(position)
                return True
        live = self._live.get(unit.model_stage)
        if live is None or live.unit != unit:
            return False
        del self._live[unit.model_stage]
        self._release(live)
        replaced = next((old for old in reversed(self._old) if old.unit.model_stage == unit.model_stage), None)
        if replaced is not None:
            self._old = [other for other in self._old if other is not replaced]
            self._live[unit.model_stage] = replaced
        return True

    def offload(self, unit: EMU) -> int:
        """Move the position of a unit to host memory, pinned where the device is a GPU; the bytes it takes there."""
        position = self.find(unit)
        if position is None:
            raise TransitionError(f"device {self._device} holds no position of {unit} to move to host memory")
        made = self._copies(position.tensors, torch.device("cpu"))
        self._settle(position, made, self.host)
        position.staged = True
        return position.stored_bytes

    def restore(self) -> tuple[EMU, ...]:
        """Take what lies in host memory back to the device; the units for which there is no room."""
        left: list[EMU] = []
        for position in (*self._live.values(), *self._old):
            if not position.staged:
                continue
            try:
                self._ledger.check("state", position.stored_bytes)
                back = self._copies(position.tensors, self._torch_device)
                self._settle(position, back, self._ledger)
            except OutOfMemoryError:
                left.append(position.unit)
                continue
            position.staged = False
        return tuple(left)

    def _copies(self, tensors: Tensors, where: torch.device) -> Tensors:
        """The same tensors elsewhere. Between a GPU and pinned host memory all copies are under way at once."""
        gpu = self._torch_device.type == "cuda"
        made: Tensors = {}
        for key, tensor in tensors.items():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=where, pin_memory=gpu and where.type == "cpu")
            made[key] = empty.copy_(tensor, non_blocking=gpu)
        if gpu:
            torch.cuda.current_stream(self._torch_device).synchronize()
        return made

    def _settle(self, position: Position, tensors: dict[tuple[str, Kind], torch.Tensor], ledger: Ledger) -> None:
        """Let `tensors` be those of a position, counted by `ledger`."""
        hold = ledger.hold("state", *tensors.values())
        self._holds.pop(id(position)).release()
        self._holds[id(position)] = hold
        position.tensors = tensors

    def find(self, unit: EMU) -> Position | None:
        """The live or old position of a unit."""
        for position in (*self._live.values(), *self._old):
            if position.unit == unit:
                return position
        return None

    def clear(self) -> None:
        """Let go of every position."""
        self.abort()
        for position in (*self._live.values(), *self._old):
            self._release(position)
        self._live.clear()
        self._old.clear()

    def _allocate(
        self, unit: EMU, schema: StateSchema, base: Position | None = None, shared: Collection[str] = ()
    ) -> Position:
        held = shards(schema, unit, self._device)
        need_bytes = sum(shard.elements for name, shard in held.items() if name not in shared) * schema.element_bytes
        self._ledger.check("state", need_bytes)
        tensors: dict[tuple[str, Kind], torch.Tensor] = {}
        for name, shard in held.items():
            for kind, dtype in schema.dtypes.items():
                if base is not None and name in shared:
                    tensors[name, kind] = base.tensors[name, kind]
                else:
                    made = torch.empty(shard.shape, dtype=TORCH_DTYPES[dtype], device=self._torch_device)
                    owned = shard.stop - shard.start
                    if shard.shape and owned < shard.shape[shard.dim]:
                        made.narrow(shard.dim, owned, shard.shape[shard.dim] - owned).zero_()
                    tensors[name, kind] = made
        position = Position(unit, schema, tensors, held=held)
        self._holds[id(position)] = self._ledger.hold("state", *tensors.values())
        return position

    def _release(self, position: Position) -> None:
        self._holds.pop(id(position)).release()
        position.tensors = {}


def shards(schema: StateSchema, unit: EMU, device: int) -> dict[str, Shard]:
    """What `device` stores of each tensor in a unit."""
    _, rank = unit.position(device)
    return {
        tensor.name: Shard(tensor.cut.dim or 0, start, stop, tensor.local_shape(unit.layout.tp, rank))
        for tensor, start, stop in schema.held(unit, device)
    }
