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
    Offload,
    OutOfMemoryError,
    Primitive,
    StateSchema,
    TransitionDAG,
    TransitionError,
)
from nereus.transition.routes import aliased, expand_flows, flows_of, goal_units, local_copies, source_units

Array = NDArray[Any]
Shards = dict[tuple[str, Kind], Array]

NUMPY_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "uint16", "int64": "int64"}
"""numpy has no bfloat16; moving state needs its bits only."""


@dataclass(slots=True)
class World:
    """What all ranks hold: (device, unit) → local shards; those in `staged` lie in host memory."""

    positions: dict[tuple[int, EMU], Shards] = field(default_factory=dict)
    staged: set[tuple[int, EMU]] = field(default_factory=set)

    @property
    def units(self) -> EMUSet:
        """The units that are whole."""
        units = dict.fromkeys(unit for _, unit in self.positions)
        return EMUSet(tuple(u for u in units if all((device, u) in self.positions for device in u.devices)))

    def stored_bytes(self, device: int) -> int:
        """Bytes of the distinct arrays on a device: one taken over by a new position counts once."""
        arrays = {
            id(array): array.nbytes
            for (where, unit), shards in self.positions.items()
            if where == device and (where, unit) not in self.staged
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


class _Group:
    """One commit group under way: what it reads, what it builds, and how often each new element was written."""

    def __init__(self, dag: TransitionDAG, steps: Sequence[Primitive], schema: StateSchema) -> None:
        self.schema = schema
        self.sources = source_units(steps)
        self.reads = {device: unit for unit in self.sources for device in unit.devices}
        self.builds = {device: unit for unit in goal_units(dag, steps) for device in unit.devices}
        self.waiting = {step.id for step in steps}
        self.allocated: set[int] = set()
        self.writes: dict[int, Array] = {}
        """id of a new array → times each element was written."""
        self._starts: dict[tuple[int, EMU], dict[str, int]] = {}

    def index(self, move: Move, unit: EMU, device: int) -> tuple[slice, ...]:
        """Where a move's box lies in the local tensor of a position."""
        key = (device, unit)
        if key not in self._starts:
            self._starts[key] = {tensor.name: start for tensor, start, _ in self.schema.held(unit, device)}
        start = self._starts[key][move.tensor]
        return _slices(move.box.dim, move.box.start - start, move.box.stop - start)


class _Run:
    def __init__(
        self, dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema], world: World, capacity: dict[int, int]
    ) -> None:
        self._world = world
        self._capacity = capacity
        self._flows = {
            name: found for ms in dag.start.model_stages for name, found in flows_of(dag, ms, schemas[ms]).items()
        }
        self._groups = {name: _Group(dag, steps, schemas[steps[0].model_stage]) for name, steps in dag.groups.items()}
        self.traffic = Traffic(peak_bytes={device: world.stored_bytes(device) for device in dag.devices})

    def step(self, primitive: Primitive) -> None:
        """One primitive; the last of a group commits it."""
        if isinstance(primitive, Destroy):
            self._destroy(primitive)
            return
        if isinstance(primitive, Offload):
            self._offload(primitive)
            return
        group = self._groups[primitive.group]
        with self._frozen(group.sources):
            for device in sorted(primitive.devices & group.builds.keys() - group.allocated):
                self._allocate(device, group)
            for move in expand_flows(self._flows[primitive.id], group.schema):
                for target in move.targets:
                    self._write(move, target, group)
                    self.traffic.sent_bytes[move.source] += move.bytes
                    self.traffic.received_bytes[target] += move.bytes
        group.waiting.remove(primitive.id)
        if not group.waiting:
            self._check_commit(group)

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

    def _allocate(self, device: int, group: _Group) -> None:
        """Take over what stays as it is, allocate the rest, and copy what is already on the device."""
        goal, source, schema = group.builds[device], group.reads.get(device), group.schema
        staged = (device, source) in self._world.staged
        shared = frozenset[str]() if source is None or staged else aliased(schema, source, goal, device)
        _, rank = goal.position(device)
        shards: Shards = {}
        for tensor, _, _ in schema.held(goal, device):
            for kind, dtype in schema.dtypes.items():
                key = (tensor.name, kind)
                if source is not None and tensor.name in shared:
                    shards[key] = self._world.positions[device, source][key]
                else:
                    shards[key] = np.zeros(tensor.local_shape(goal.layout.tp, rank), dtype=NUMPY_DTYPES[dtype])
                    group.writes[id(shards[key])] = np.zeros(shards[key].shape, dtype=np.int8)
        self._admit(device, goal, shards)
        group.allocated.add(device)
        if source is not None:
            for move in local_copies(schema, source, goal, device, staged):
                self._write(move, device, group)

    def _admit(self, device: int, goal: EMU, shards: Shards) -> None:
        before = self._world.stored_bytes(device)
        self._world.positions[device, goal] = shards
        stored = self._world.stored_bytes(device)
        limit = self._capacity.get(device, stored)
        if stored > limit and stored > before:
            del self._world.positions[device, goal]
            raise OutOfMemoryError(device, stored - before, before, limit, f"a position of {goal}")
        self.traffic.peak_bytes[device] = max(self.traffic.peak_bytes.get(device, 0), stored)

    def _write(self, move: Move, target: int, group: _Group) -> None:
        key, source, goal = (move.tensor, move.kind), group.reads[move.source], group.builds[target]
        held = self._world.positions[move.source, source][key]
        data = held[group.index(move, source, move.source)[: held.ndim]]
        if data.nbytes != move.bytes:
            raise TransitionError(f"{move.tensor} {move.kind}: the box has {data.nbytes} bytes, {move.bytes} planned")
        array = self._world.positions[target, goal][key]
        index = group.index(move, goal, target)[: array.ndim]
        array[index] = data
        group.writes[id(array)][index] += 1

    def _check_commit(self, group: _Group) -> None:
        for device, goal in group.builds.items():
            for tensor, start, stop in group.schema.held(goal, device):
                owned = _slices(tensor.cut.dim or 0, 0, stop - start)[: len(tensor.shape)]
                for kind in group.schema.dtypes:
                    writes = group.writes.get(id(self._world.positions[device, goal][tensor.name, kind]))
                    if writes is not None and not (writes[owned] == 1).all():
                        raise TransitionError(f"{goal}, device {device}: {tensor.name} {kind} not written exactly once")

    def _destroy(self, destroy: Destroy) -> None:
        unit = destroy.sources[0]
        for name, group in self._groups.items():
            if unit in group.sources and group.waiting:
                raise TransitionError(f"{destroy.id} runs before {name}, which reads its unit, has committed")
        for device in unit.devices:
            del self._world.positions[device, unit]
            self._world.staged.discard((device, unit))

    def _offload(self, offload: Offload) -> None:
        """Copies in "host memory": equal arrays of their own, which no later position can take over."""
        unit = offload.sources[0]
        for device in unit.devices:
            shards = self._world.positions[device, unit]
            size = sum(array.nbytes for array in shards.values())
            if size != offload.hosts[device]:
                raise TransitionError(
                    f"{offload.id}: device {device} holds {size} bytes, {offload.hosts[device]} planned"
                )
            self._world.positions[device, unit] = {key: array.copy() for key, array in shards.items()}
            self._world.staged.add((device, unit))


def _slices(dim: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*(slice(None),) * dim, slice(start, stop))
