"""Primitives, their DAG, and the moves they expand to (paper §5.2, §6.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

from nereus.core.emu import EMU, EMUSet
from nereus.core.errors import SettingsError
from nereus.core.model_stage import ModelStage
from nereus.core.state import Kind


@dataclass(frozen=True, slots=True)
class Primitive:
    """One step of a transition. `group` names its commit group; byte counts are stored bytes by device.

    An acquiring primitive builds `targets` out of shards of `sources`; Offload and Destroy have sources alone.
    `acquires` are allocated when the primitive starts, `releases` freed when it ends.

    A source is a unit of the start, a T_sub unit that an earlier primitive of the same group makes, or a goal unit
    that an earlier group of the same transition builds: new replicas are forwarded (D6.4). A STATE edge from that
    group's last primitive makes the reader wait until the group has committed.
    """

    id: str
    sources: tuple[EMU, ...]
    targets: tuple[EMU, ...]
    group: str
    acquires: Mapping[int, int] = field(default_factory=dict)
    releases: Mapping[int, int] = field(default_factory=dict)

    @property
    def model_stage(self) -> ModelStage:
        """The model-stage it changes."""
        return self.sources[0].model_stage

    @property
    def devices(self) -> frozenset[int]:
        """Every device that takes part."""
        if len(self.sources) == 1 and not self.targets:
            return frozenset(self.sources[0].devices)
        return frozenset(chain.from_iterable([unit.devices for unit in (*self.sources, *self.targets)]))

    @property
    def name(self) -> str:
        """Split, Merge, Extend, Offload or Destroy."""
        return type(self).__name__

    def __str__(self) -> str:
        sources, targets = (" + ".join(map(str, units)) for units in (self.sources, self.targets))
        return f"{self.name}({sources}) -> {targets or 'nothing'}"


@dataclass(frozen=True, slots=True)
class Split(Primitive):
    """Cut a unit into smaller, independent units on its own devices."""


@dataclass(frozen=True, slots=True)
class Merge(Primitive):
    """Assemble a larger unit from replicas of the same model-stage."""


@dataclass(frozen=True, slots=True)
class Extend(Primitive):
    """Copy a unit's state to devices that hold none of it."""


@dataclass(frozen=True, slots=True)
class Offload(Primitive):
    """Move a unit's state to the host memory of its own devices, so that they have room before its Destroy.

    `releases` are the device bytes freed, `hosts` the bytes of host memory taken, by device. The unit stays a source,
    read from host memory, until its Destroy, which frees the host bytes and releases nothing on the devices. A position
    that is built on a device of the unit afterwards takes over none of its storage. It is in no commit group: until it
    ends the state is read where it was.
    """

    hosts: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.sources) != 1 or self.targets or self.acquires:
            raise SettingsError(f"{self.id}: Offload has one source, no targets, and acquires nothing")
        if set(self.hosts) != set(self.sources[0].devices):
            raise SettingsError(f"{self.id}: host bytes of devices {sorted(self.hosts)}, {self.sources[0]}")


@dataclass(frozen=True, slots=True)
class Destroy(Primitive):
    """Release a unit whose state is held elsewhere. Never undone."""

    def __post_init__(self) -> None:
        if self.targets:
            raise SettingsError(f"{self.id}: Destroy has no targets")


class EdgeKind(StrEnum):
    """Why one primitive waits for another."""

    STATE = "state"
    RESOURCE = "resource"


@dataclass(frozen=True, slots=True)
class Edge:
    """`later` starts only after `earlier` has completed; a STATE edge out of a group also waits for its commit."""

    earlier: str
    later: str
    kind: EdgeKind


@dataclass(frozen=True, slots=True)
class TransitionDAG:
    """From the units that exist to the goal. `primitives` are in a valid execution order, the same on every device.

    `node_of` says on which node each device is, where that is known: who sends to whom depends on it. `span_bytes` is
    how long the order takes in the scheduler's model, in bytes over the fastest link; none takes less than
    `bound_bytes`. One that is `folded` has `lots`, and makes its primitives and edges when somebody asks for them.
    """

    start: EMUSet
    goal: EMUSet
    primitives: tuple[Primitive, ...] = ()
    edges: tuple[Edge, ...] = ()
    node_of: Mapping[int, int] = field(default_factory=dict)
    span_bytes: int = 0
    bound_bytes: int = 0
    lots: tuple[Lot, ...] = field(default=(), init=False, repr=False, compare=False)

    @classmethod
    def folded(
        cls,
        start: EMUSet,
        goal: EMUSet,
        lots: tuple[Lot, ...],
        node_of: Mapping[int, int],
        span_bytes: int,
        bound_bytes: int,
    ) -> TransitionDAG:
        """The transition that `lots` make together; they share no device."""
        made = cls(start, goal, (), (), node_of, span_bytes, bound_bytes)
        object.__setattr__(made, "lots", lots)
        for name in ("primitives", "edges"):
            object.__delattr__(made, name)
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The primitives and edges of all lots, at first use; no other field is ever unset.

            They are fields, which `replace` and the codec take: no property can have their names, nor can a slotted
            class cache one. What is set is found without coming here.
            """
            if name not in ("primitives", "edges"):
                raise AttributeError(f"a TransitionDAG has no {name}")
            parts = [part for lot in self.lots for part in lot.parts()]
            object.__setattr__(self, "primitives", tuple(chain.from_iterable(steps for steps, _ in parts)))
            object.__setattr__(self, "edges", tuple(chain.from_iterable(edges for _, edges in parts)))
            return object.__getattribute__(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        ends, order = (self.start, self.goal), (self.node_of, self.span_bytes, self.bound_bytes)
        if self.lots:
            return TransitionDAG.folded, (*ends, self.lots, *order)
        return TransitionDAG, (*ends, self.primitives, self.edges, *order)

    def __post_init__(self) -> None:
        place = {primitive.id: index for index, primitive in enumerate(self.primitives)}
        if len(place) != len(self.primitives):
            ids = [primitive.id for primitive in self.primitives]
            raise SettingsError(f"transition: primitive ids repeat: {ids}")
        try:
            backwards = [edge for edge in self.edges if place[edge.earlier] >= place[edge.later]]
        except KeyError:
            unknown = {edge.earlier for edge in self.edges} | {edge.later for edge in self.edges}
            raise SettingsError(f"transition: edges name unknown primitives {sorted(unknown - set(place))}") from None
        if backwards:
            try:
                tuple(TopologicalSorter(self.predecessors()).static_order())
            except CycleError as error:
                raise SettingsError(f"transition: primitives wait for each other: {error.args[1]}") from None
            edge = backwards[0]
            raise SettingsError(f"transition: {edge.later} is listed before {edge.earlier}, which it waits for")

    def predecessors(self) -> dict[str, set[str]]:
        """Primitive id → ids it waits for."""
        before: dict[str, set[str]] = {primitive.id: set() for primitive in self.primitives}
        for edge in self.edges:
            before.setdefault(edge.later, set()).add(edge.earlier)
        return before

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return all(lot.dag.idle for lot in self.lots) if self.lots else not self.primitives

    @property
    def certified(self) -> bool:
        """Whether no order can take less: the bound is met."""
        return self.span_bytes <= self.bound_bytes

    @property
    def groups(self) -> Mapping[str, tuple[Primitive, ...]]:
        """Commit groups of the acquiring primitives, in order."""
        found: dict[str, list[Primitive]] = {}
        for primitive in self.primitives:
            if not isinstance(primitive, Destroy | Offload):
                found.setdefault(primitive.group, []).append(primitive)
        return {name: tuple(members) for name, members in found.items()}

    @property
    def offloaded(self) -> frozenset[EMU]:
        """The units that an Offload moves to host memory."""
        return frozenset(primitive.sources[0] for primitive in self.primitives if isinstance(primitive, Offload))

    @property
    def devices(self) -> frozenset[int]:
        """Every device that takes part."""
        return frozenset[int]().union(*(primitive.devices for primitive in self.primitives))


@dataclass(frozen=True, slots=True)
class Lot:
    """Parts of a transition that are alike but for their devices, ordered once.

    `dag` is the part on the devices of the first of `copies`; in the others, the device at the same place stands for
    each. Copies are in ascending order, so that who sends to whom is alike as well.
    """

    dag: TransitionDAG
    copies: tuple[tuple[int, ...], ...]

    def everywhere(self, sizes: Mapping[int, int]) -> dict[int, int]:
        """Device of any copy → what `sizes` says of the one in its place in the first."""
        known = [device in sizes for device in self.copies[0]]
        values = [sizes[device] for device in compress(self.copies[0], known)]
        found: dict[int, int] = {}
        for copy in self.copies:
            found.update(zip(compress(copy, known), values, strict=True))
        return found

    def named(self, primitive: str) -> str:
        """The name in the whole transition of one of the first copy."""
        return f"{primitive}@{self.copies[0][0]}"

    def parts(self) -> Iterator[tuple[tuple[Primitive, ...], tuple[Edge, ...]]]:
        """Primitives and edges of each copy."""
        for copy in self.copies:
            there = _Elsewhere(self.copies[0], copy)
            edges = [Edge(edge.earlier + there.mark, edge.later + there.mark, edge.kind) for edge in self.dag.edges]
            yield tuple(map(there.primitive, self.dag.primitives)), tuple(edges)


class _Elsewhere:
    """Takes what happens on some devices to others. The first of those marks its names."""

    def __init__(self, here: tuple[int, ...], there: tuple[int, ...]) -> None:
        self.mark = f"@{there[0]}"
        self._at = dict(zip(here, there, strict=True))
        self._units: dict[EMU, EMU] = {}

    def unit(self, unit: EMU) -> EMU:
        """The same unit there."""
        if unit not in self._units:
            devices = tuple(map(self._at.__getitem__, unit.devices))
            self._units[unit] = EMU(unit.model_stage, unit.layout, devices)
        return self._units[unit]

    def primitive(self, primitive: Primitive) -> Primitive:
        """The same primitive there."""
        changes: dict[str, Any] = {
            "id": primitive.id + self.mark,
            "group": primitive.group + self.mark,
            "sources": tuple(map(self.unit, primitive.sources)),
            "targets": tuple(map(self.unit, primitive.targets)),
        }
        for name in ("acquires", "releases", "hosts"):
            if sizes := getattr(primitive, name, None):
                changes[name] = {self._at[device]: size for device, size in sizes.items()}
        return replace(primitive, **changes)


@dataclass(frozen=True, slots=True)
class Box:
    """A range of indices of one dim of a logical tensor; the other dims are whole."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Move:
    """One box of one tensor and kind, sent by `source` to every device of `targets`."""

    tensor: str
    kind: Kind
    box: Box
    source: int
    targets: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class TransitionEstimate:
    """What a transition is expected to take. `minimum_bytes` is M*, `composed_bytes` the paper's composition C."""

    seconds: float
    peak_bytes: Mapping[int, int]
    link_bytes: Mapping[str, int]
    moved_bytes: int
    minimum_bytes: int
    composed_bytes: int
    critical_path: tuple[str, ...] = ()
