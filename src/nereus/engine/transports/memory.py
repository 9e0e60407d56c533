"""Every rank in one process, as dictionaries of numpy arrays: runs whole transitions through the same routes.

What a transport cannot see, this one checks: no element is written twice or left out, no source is written while a
commit group reads it, and nothing is freed that is still needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.core import (
    EMU,
    Destroy,
    EMUSet,
    Kind,
    ModelStage,
    Move,
    OutOfMemoryError,
    Primitive,
    StateSchema,
    TransitionDAG,
    TransitionError,
)
from nereus.transition.routes import alias_source, aliased, expand_flows, flows_of, goal_units, local_copies
from nereus.transition.routes import source_units as sources_of

Array = NDArray[Any]
Shards = dict[tuple[str, Kind], Array]

NUMPY_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "uint16", "int64": "int64"}
"""numpy has no bfloat16; moving state needs its bits only."""


@dataclass(slots=True)
class World:
    """What all ranks hold: (device, unit) → local shards."""

    positions: dict[tuple[int, EMU], Shards] = field(default_factory=dict)

    @property
    def units(self) -> EMUSet:
        """The units that are whole."""
        units = dict.fromkeys(unit for _, unit in self.positions)
        return EMUSet(tuple(u for u in units if all((device, u) in self.positions for device in u.devices)))

    def stored_bytes(self, device: int) -> int:
        """Bytes of the distinct arrays on a device: one taken over by a new position counts once."""
        arrays = {
            id(array): array.nbytes
            for (where, _), shards in self.positions.items()
            if where == device
            for array in shards.values()
        }
        return sum(arrays.values())


@dataclass(slots=True)
class Traffic:
    """Bytes that crossed between ranks, and the most that each rank stored."""

    received_bytes: Counter[int] = field(default_factory=Counter)
    sent_bytes: Counter[int] = field(default_factory=Counter)
    peak_bytes: dict[int, int] = field(default_factory=dict)


def execute(
    dag: TransitionDAG,
    schemas: Mapping[ModelStage, StateSchema],
    world: World,
    capacity: Mapping[int, int] | None = None,
) -> Traffic:
    """Run a transition on `world`, in the listed order. Raises OutOfMemoryError beyond a device's capacity."""
    run = _Run(dag, schemas, world, dict(capacity or {}))
    for primitive in dag.primitives:
        run.step(primitive)
    return run.traffic


class _Pending:
    """The goal positions of one commit group before it commits, and how often each element was written."""

    def __init__(self, steps: Sequence[Primitive]) -> None:
        self.waiting = {step.id for step in steps}
        self.new: set[tuple[int, EMU]] = set()
        self.writes: dict[int, tuple[Array, Array]] = {}

    def track(self, array: Array) -> None:
        self.writes[id(array)] = (array, np.zeros(array.shape, dtype=np.int8))


class _Run:
    def __init__(
        self, dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema], world: World, capacity: dict[int, int]
    ) -> None:
        self._dag = dag
        self._schemas = schemas
        self._world = world
        self._capacity = capacity
        self._flows = {
            name: found for ms in dag.start.model_stages for name, found in flows_of(dag, ms, schemas[ms]).items()
        }
        self._pending = {name: _Pending(steps) for name, steps in dag.groups.items()}
        self._committed: set[str] = set()
        self.traffic = Traffic(peak_bytes={device: world.stored_bytes(device) for device in dag.devices})

    def step(self, primitive: Primitive) -> None:
        """One primitive; the last of a group commits it."""
        if isinstance(primitive, Destroy):
            self._destroy(primitive)
            return
        steps = self._dag.groups[primitive.group]
        pending = self._pending[primitive.group]
        schema = self._schemas[primitive.model_stage]
        with self._frozen(sources_of(self._dag, steps)):
            for goal in goal_units(self._dag, steps):
                for device in goal.devices:
                    if device in primitive.devices and (device, goal) not in pending.new:
                        self._allocate(device, goal, alias_source(self._dag, steps, device), schema, pending)
            for move in expand_flows(self._flows[primitive.id], schema):
                self._move(move, steps, schema, pending)
        pending.waiting.remove(primitive.id)
        if not pending.waiting:
            self._commit(primitive.group, schema)

    @contextmanager
    def _frozen(self, units: Sequence[EMU]) -> Iterator[None]:
        """Writing to a source is an error while a group reads it."""
        arrays = [a for unit in units for d in unit.devices for a in self._world.positions[d, unit].values()]
        for array in arrays:
            array.flags.writeable = False
        try:
            yield
        finally:
            for array in arrays:
                array.flags.writeable = True

    def _allocate(self, device: int, goal: EMU, source: EMU | None, schema: StateSchema, pending: _Pending) -> None:
        """Take over what stays as it is, allocate the rest, and copy what is already on the device."""
        shared = frozenset[str]() if source is None else aliased(schema, source, goal, device)
        _, rank = goal.position(device)
        shards: Shards = {}
        for tensor, _, _ in schema.held(goal, device):
            for kind, dtype in schema.dtypes.items():
                if source is not None and tensor.name in shared:
                    shards[tensor.name, kind] = self._world.positions[device, source][tensor.name, kind]
                else:
                    shape = tensor.local_shape(goal.layout.tp, rank)
                    shards[tensor.name, kind] = np.zeros(shape, dtype=NUMPY_DTYPES[dtype])
                    pending.track(shards[tensor.name, kind])
        self._admit(device, goal, shards)
        pending.new.add((device, goal))
        if source is not None:
            for move in local_copies(schema, source, goal, device):
                self._write(move, source, goal, device, schema, pending)

    def _admit(self, device: int, goal: EMU, shards: Shards) -> None:
        before = self._world.stored_bytes(device)
        self._world.positions[device, goal] = shards
        stored = self._world.stored_bytes(device)
        limit = self._capacity.get(device, stored)
        if stored > limit and stored > before:
            del self._world.positions[device, goal]
            raise OutOfMemoryError(device, stored - before, before, limit, f"a position of {goal}")
        self.traffic.peak_bytes[device] = max(self.traffic.peak_bytes.get(device, 0), stored)

    def _move(self, move: Move, steps: Sequence[Primitive], schema: StateSchema, pending: _Pending) -> None:
        source = next(unit for unit in sources_of(self._dag, steps) if move.source in unit.devices)
        for target in move.targets:
            goal = next(unit for unit in goal_units(self._dag, steps) if target in unit.devices)
            self._write(move, source, goal, target, schema, pending)
            self.traffic.sent_bytes[move.source] += move.bytes
            self.traffic.received_bytes[target] += move.bytes

    def _write(self, move: Move, source: EMU, goal: EMU, target: int, schema: StateSchema, pending: _Pending) -> None:
        key = (move.tensor, move.kind)
        data = self._world.positions[move.source, source][key][_index(move, source, move.source, schema)]
        if data.nbytes != move.bytes:
            raise TransitionError(f"{move.tensor} {move.kind}: the box has {data.nbytes} bytes, {move.bytes} planned")
        array, writes = pending.writes[id(self._world.positions[target, goal][key])]
        index = _index(move, goal, target, schema)
        array[index] = data
        writes[index] += 1

    def _commit(self, group: str, schema: StateSchema) -> None:
        pending = self._pending[group]
        for device, goal in pending.new:
            for tensor, start, stop in schema.held(goal, device):
                for kind in schema.dtypes:
                    array = self._world.positions[device, goal][tensor.name, kind]
                    _, writes = pending.writes.get(id(array), (array, None))
                    owned = _slices(len(array.shape), tensor.cut.dim or 0, 0, stop - start)
                    if writes is not None and not (writes[owned] == 1).all():
                        raise TransitionError(f"{goal}, device {device}: {tensor.name} {kind} not written exactly once")
        pending.writes.clear()
        self._committed.add(group)

    def _destroy(self, destroy: Destroy) -> None:
        unit = destroy.sources[0]
        for name, steps in self._dag.groups.items():
            if unit in sources_of(self._dag, steps) and name not in self._committed:
                raise TransitionError(f"{destroy.id} runs before {name}, which reads its unit, has committed")
        for device in unit.devices:
            del self._world.positions[device, unit]


def _index(move: Move, unit: EMU, device: int, schema: StateSchema) -> tuple[slice, ...]:
    """Where a move's box lies in the local tensor of a position."""
    tensor, start, _ = next(entry for entry in schema.held(unit, device) if entry[0].name == move.tensor)
    return _slices(len(tensor.shape), move.box.dim, move.box.start - start, move.box.stop - start)


def _slices(dims: int, dim: int, start: int, stop: int) -> tuple[slice, ...]:
    return tuple(slice(start, stop) if index == dim else slice(None) for index in range(dims))
