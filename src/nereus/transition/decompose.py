"""One model-stage's change as primitives in the default order Split → Destroy → Extend → Merge (paper §6.1).

Moves are direct (D6.2): units of the common layout T_sub name what a Split or Extend makes, but never hold state of
their own. The steps that lead to the same goal units form one commit group; its sources stay whole until it commits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from nereus.core import (
    EMU,
    Destroy,
    Edge,
    EdgeKind,
    Extend,
    Layout,
    Merge,
    Primitive,
    Split,
    StateSchema,
    TransitionError,
)
from nereus.transition.classes import layouts_of
from nereus.transition.flows import Job, flows
from nereus.transition.sizes import Sizes, position

FUNNEL = 1.5
"""A device that sends more than this many times the mean is relieved by other replicas where they can."""
RELIEF = 0.9
"""What the busiest device must come down to for a wider choice of sources to be worth its dependencies."""


@dataclass(frozen=True, slots=True)
class LocalDAG:
    """Groups (their primitives in order) and destroys of one model-stage, with the STATE edges among them."""

    groups: tuple[tuple[Primitive, ...], ...] = ()
    destroys: tuple[Destroy, ...] = ()
    edges: tuple[Edge, ...] = ()


@dataclass(slots=True)
class _Batch:
    """Goal units that commit together, and the existing units they are built from."""

    goals: tuple[EMU, ...]
    sources: tuple[EMU, ...]
    senders: dict[int, set[int]] = field(default_factory=dict)
    """Target device → the devices that send to it."""

    @property
    def all_senders(self) -> frozenset[int]:
        """Every device that sends."""
        return frozenset[int]().union(*self.senders.values())

    @property
    def held(self) -> frozenset[int]:
        """Devices of the sources."""
        return frozenset(device for unit in self.sources for device in unit.devices)

    @property
    def local(self) -> tuple[EMU, ...]:
        """Sources that share a device with a goal unit."""
        devices = {device for goal in self.goals for device in goal.devices}
        return tuple(unit for unit in self.sources if devices & set(unit.devices))


def decompose(start: Sequence[EMU], goal: Sequence[EMU], schema: StateSchema, unread: Collection[EMU] = ()) -> LocalDAG:
    """The local DAG from the units `start` to `goal`, both of one model-stage.

    Units in both are kept and produce nothing. Units `unread` are redundant ones that nothing may be built from, so
    that they can be destroyed before anything is acquired. Raises TransitionError when there is no unit to copy from,
    or when nothing would be left.
    """
    kept = set(start) & set(goal)
    left = [unit for unit in start if unit not in kept]
    built = [unit for unit in goal if unit not in kept]
    readable = [unit for unit in start if unit not in set(unread)]
    if built and not readable:
        raise TransitionError(f"{built[0].model_stage}: no unit exists that the goal could be built from")
    if left and not goal:
        raise TransitionError(f"{left[0].model_stage}: the goal has no unit of it, its last copy would be destroyed")
    if not left and not built:
        return LocalDAG()
    sub = _common(layouts_of((*readable, *goal)))
    batches = _batches(built, readable, kept, sub)
    batches = _settle(batches, readable, schema)
    sizes = Sizes(schema, layouts_of((*start, *goal)))
    groups: list[tuple[Primitive, ...]] = []
    edges: list[Edge] = []
    for index, batch in enumerate(batches):
        steps, inner = _steps(batch, kept, sub, f"{batch.goals[0].model_stage}/{index}")
        groups.append(_with_acquires(steps, batch, sizes))
        edges.extend(inner)
    destroys = _destroys(left, batches, sizes)
    for destroy in destroys:
        for batch, group in zip(batches, groups, strict=True):
            if destroy.sources[0] in batch.sources:
                edges.extend(Edge(step.id, destroy.id, EdgeKind.STATE) for step in group)
    return LocalDAG(tuple(groups), destroys, tuple(edges))


def _degrees(layout: Layout) -> tuple[int, int]:
    return (layout.tp, layout.pp)


def _common(layouts: Sequence[Layout]) -> Layout:
    """T_sub: the largest layout that all of `layouts` can be split into."""
    return Layout(gcd(*(layout.tp for layout in layouts)), gcd(*(layout.pp for layout in layouts)))


def _batches(built: Sequence[EMU], readable: Sequence[EMU], kept: Collection[EMU], sub: Layout) -> list[_Batch]:
    """Goal units that need the same Split commit together; the rest on their own."""
    splits = [unit for unit in readable if unit not in kept and _degrees(unit.layout) != _degrees(sub)]
    split_on = {device: index for index, unit in enumerate(splits) for device in unit.devices}
    parts: list[tuple[list[EMU], set[int]]] = []
    for goal in built:
        touched = {split_on[device] for device in goal.devices if device in split_on}
        joined = [part for part in parts if part[1] & touched]
        parts = [part for part in parts if not part[1] & touched]
        units = [unit for part in joined for unit in part[0]]
        parts.append(([*units, goal], touched.union(*(part[1] for part in joined))))
    order = {goal: index for index, goal in enumerate(built)}
    goals = [tuple(sorted(units, key=order.__getitem__)) for units, _ in parts]
    goals.sort(key=lambda units: order[units[0]])
    return _with_sources(goals, readable)


def _with_sources(parts: Sequence[tuple[EMU, ...]], readable: Sequence[EMU]) -> list[_Batch]:
    """Choose what each part reads: the units on its own devices when they reach, else every replica.

    Goal units on fresh devices take one replica each, in turn, as long as every replica gets the same number.
    """
    unit_on = {device: unit for unit in readable for device in unit.devices}
    found: list[_Batch] = []
    fresh: list[_Batch] = []
    for goals in parts:
        devices = [device for goal in goals for device in goal.devices]
        local = tuple(dict.fromkeys(unit_on[device] for device in devices if device in unit_on))
        whole = all(device in unit_on for device in devices)
        found.append(_Batch(goals, local if whole else tuple(readable)))
        if not local:
            fresh.append(found[-1])
    for index in range(len(fresh) - len(fresh) % len(readable)):
        fresh[index].sources = (readable[index % len(readable)],)
    return found


def _settle(batches: Sequence[_Batch], readable: Sequence[EMU], schema: StateSchema) -> list[_Batch]:
    """Drop sources that send nothing; where one device sends too much, ask every replica if that relieves it."""
    settled, loads = _prune(batches, schema)
    while loads:
        busiest = max(loads, key=lambda device: (loads[device], -device))
        if loads[busiest] <= FUNNEL * loads.total() / len(loads):
            break
        wider = [replace(b, sources=tuple(readable)) if busiest in b.all_senders else b for b in settled]
        tried, relieved = _prune(wider, schema)
        if max(relieved.values()) > RELIEF * loads[busiest]:
            break
        settled, loads = tried, relieved
    return settled


def _prune(batches: Sequence[_Batch], schema: StateSchema) -> tuple[list[_Batch], Counter[int]]:
    """The batches without sources that send nothing, so that no Destroy waits for them, and what each device sends."""
    found = flows(schema, [Job(batch.sources, batch.goals) for batch in batches])
    pruned: list[_Batch] = []
    for batch, entries in zip(batches, found, strict=True):
        senders = {flow.source for flow in entries}
        local = set(batch.local)
        used = tuple(unit for unit in batch.sources if unit in local or not senders.isdisjoint(unit.devices))
        pruned.append(_Batch(batch.goals, used))
    loads: Counter[int] = Counter()
    for batch, entries in zip(pruned, flows(schema, [Job(b.sources, b.goals) for b in pruned]), strict=True):
        for flow in entries:
            batch.senders.setdefault(flow.target, set()).add(flow.source)
            loads[flow.source] += flow.elements
    return pruned, loads


def _steps(batch: _Batch, kept: Collection[EMU], sub: Layout, name: str) -> tuple[list[Primitive], list[Edge]]:
    """Splits, then per goal unit an Extend and a Merge as far as they are needed."""
    split_units = [u for u in batch.local if u not in kept and _degrees(u.layout) != _degrees(sub)]
    inside = len(batch.sources) == 1 and all(batch.held.issuperset(goal.devices) for goal in batch.goals)
    if split_units and inside and _degrees(batch.goals[0].layout) == _degrees(sub):
        return [Split(f"{name}/split", batch.sources, batch.goals, name)], []
    splits: list[Primitive] = [
        Split(f"{name}/split{index}", (unit,), _labels(unit, sub), name) for index, unit in enumerate(split_units)
    ]
    pieces = [label for split in splits for label in split.targets]
    pieces.extend(unit for unit in batch.sources if unit not in split_units)
    steps = list(splits)
    edges: list[Edge] = []
    for index, goal in enumerate(batch.goals):
        made = _build(batch, goal, pieces, sub, (name, index))
        *extend, last = made
        if isinstance(last, Merge):
            feeding = [split for split in splits if not set(split.targets).isdisjoint(last.sources)]
            edges.extend(Edge(step.id, last.id, EdgeKind.STATE) for step in (*feeding, *extend))
        steps.extend(made)
    return steps, edges


def _build(
    batch: _Batch, goal: EMU, pieces: Sequence[EMU], sub: Layout, name: tuple[str, int]
) -> tuple[Primitive, ...]:
    """An Extend to the devices of `goal` that held nothing, then a Merge of what its devices and senders hold."""
    group, index = name
    fresh = batch.held.isdisjoint(goal.devices)
    labels = _labels(goal, sub) if fresh and _degrees(goal.layout) != _degrees(sub) else (goal,)
    extend = Extend(f"{group}/extend{index}", batch.sources, labels, group)
    if fresh:
        merge = Merge(f"{group}/merge{index}", labels, (goal,), group)
        return (extend,) if labels == (goal,) else (extend, merge)
    taking = set(goal.devices).union(*(batch.senders.get(device, ()) for device in batch.held & set(goal.devices)))
    sources = tuple(piece for piece in pieces if not taking.isdisjoint(piece.devices))
    merge = Merge(f"{group}/merge{index}", sources, (goal,), group)
    return (merge,) if batch.held.issuperset(goal.devices) else (extend, merge)


def _labels(unit: EMU, sub: Layout) -> tuple[EMU, ...]:
    """The T_sub units that a unit's devices make: piece (a, b) takes the a-th of each run of tp ranks, b-th of pp."""
    tp_step, pp_step = unit.layout.tp // sub.tp, unit.layout.pp // sub.pp
    return tuple(
        EMU(
            unit.model_stage,
            sub,
            tuple(unit.device(p * pp_step + b, t * tp_step + a) for p in range(sub.pp) for t in range(sub.tp)),
        )
        for b in range(pp_step)
        for a in range(tp_step)
    )


def _source_on(batch: _Batch, device: int) -> EMU | None:
    return next((unit for unit in batch.sources if device in unit.devices), None)


def _with_acquires(steps: Sequence[Primitive], batch: _Batch, sizes: Sizes) -> tuple[Primitive, ...]:
    """Put what each goal position newly allocates on the first step that touches its device."""
    acquires: dict[str, dict[int, int]] = {step.id: {} for step in steps}
    for goal in batch.goals:
        for device in goal.devices:
            first = next(step for step in steps if device in step.devices)
            acquires[first.id][device] = sizes.stored(position(goal, device)) - _shared(batch, goal, device, sizes)
    return tuple(replace(step, acquires=acquires[step.id]) for step in steps)


def _shared(batch: _Batch, goal: EMU, device: int, sizes: Sizes) -> int:
    source = _source_on(batch, device)
    return 0 if source is None else sizes.shared(position(source, device), position(goal, device))


def _destroys(left: Sequence[EMU], batches: Sequence[_Batch], sizes: Sizes) -> tuple[Destroy, ...]:
    """One Destroy for every unit that is not kept; storage that a goal position took over stays."""
    taken: dict[tuple[EMU, int], int] = {}
    for batch in batches:
        for goal in batch.goals:
            for device in goal.devices:
                source = _source_on(batch, device)
                if source is not None:
                    taken[source, device] = _shared(batch, goal, device, sizes)
    made: list[Destroy] = []
    for index, unit in enumerate(left):
        name = f"{unit.model_stage}/destroy{index}"
        releases: Mapping[int, int] = {
            device: sizes.stored(position(unit, device)) - taken.get((unit, device), 0) for device in unit.devices
        }
        made.append(Destroy(name, (unit,), (), name, releases=releases))
    return tuple(made)
