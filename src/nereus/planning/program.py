"""A shape compiled for the search: sums over model-stages whose largest one counts.

Three families of sums follow from a shape. The step is the largest sum of call times over the *paths* through its
calls; the devices in use are the largest sum over *selections* of model-stages that run side by side; what a partition
stores is the largest sum over selections of one group a stage. With some model-stages chosen (`Layer`), sums that lack
the same terms need not be told apart: the largest of them is one *column*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from nereus.core import ModelStage, Workflow
from nereus.cost.schedule import SYNC, node_order
from nereus.planning.space import Shape, shapes

Terms = tuple[int, ...]
"""By level, what a sum takes of that model-stage: for paths a set of its calls as bits, else 0 or 1."""


@dataclass(frozen=True, slots=True)
class Column:
    """The largest of some partial sums: over `sources`, an earlier column (-1: nothing) plus a term of the new level.

    `rests` are the ways in which such a sum may go on, by level.
    """

    sources: tuple[tuple[int, int], ...]
    rests: tuple[Terms, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """Columns once the levels in `chosen` are, the last of them being new."""

    chosen: tuple[int, ...]
    paths: tuple[Column, ...]
    devices: tuple[Column, ...]
    stored: tuple[tuple[Column, ...], ...]
    """By partition."""

    rest: tuple[int, ...]
    """Levels that are not chosen."""
    open: tuple[bool, ...]
    """By partition, whether some of its levels are not chosen."""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Known by identity: each is compiled once.

    `levels` in the order they are chosen in, the partition of each, and the families as sums over all levels.
    """

    shape: Shape
    levels: tuple[ModelStage, ...]
    home: tuple[int, ...]
    paths: tuple[Terms, ...]
    devices: tuple[Terms, ...]
    stored: tuple[tuple[Terms, ...], ...]
    layers: tuple[Layer, ...]
    """After one, two, ... levels."""
    alone: tuple[Layer, ...]
    """With one level chosen and no other."""
    sides: tuple[tuple[int, ...], tuple[int, ...]]
    """Levels of one part of the pool, and those that never have devices of it; both empty without such a cut."""

    @property
    def colocated(self) -> bool:
        """Whether the pool is one partition."""
        return len(self.shape.partitions) == 1


def _compiled(
    shape: Shape, who: tuple[tuple[str, ModelStage], ...], before: tuple[tuple[str, tuple[str, ...]], ...], split: bool
) -> Program:
    levels = shape.order
    calls = dict(who)
    waits = _waits(shape, calls, {name: set(others) for name, others in before})
    home = tuple(shape.home(ms)[0] for ms in levels)
    paths = _paths(levels, calls, waits)
    devices = tuple(sorted((one for one in _selections(shape, levels, split) if sum(one) > 1), reverse=True))
    stored = tuple(tuple(sorted(_stored(groups, levels), reverse=True)) for groups in shape.partitions)
    families = (paths, devices, *stored)

    def layer(chosen: tuple[int, ...]) -> Layer:
        first, second, *third = (_columns(family, chosen) for family in families)
        rest = tuple(level for level in range(len(levels)) if level not in chosen)
        unfinished = tuple(any(home[level] == index for level in rest) for index in range(len(shape.partitions)))
        return Layer(chosen, first, second, tuple(third), rest, unfinished)

    return Program(
        shape, levels, home, paths, devices, stored,
        tuple(layer(tuple(range(count))) for count in range(1, len(levels) + 1)),
        tuple(layer((level,)) for level in range(len(levels))), _sides(shape, levels, devices),
    )  # fmt: skip


def programs(workflow: Workflow, every: tuple[Shape, ...] = (), split: bool = False) -> tuple[Program, ...]:
    """The programs of shapes of a workflow, of all where none are given; they depend on no size and are remembered.

    With `split` each partition has its own devices, so that parts of different ones do not add up.
    """
    order, before = node_order(workflow)
    stage_of = {call.name: call.model_stage for call in workflow.calls}
    names = [name for name in order if name != SYNC]
    who = tuple((name, stage_of[name]) for name in names)
    return _every(every, workflow.model_stages, who, tuple((name, before[name]) for name in names), split)


@cache
def _every(
    every: tuple[Shape, ...],
    model_stages: tuple[ModelStage, ...],
    who: tuple[tuple[str, ModelStage], ...],
    before: tuple[tuple[str, tuple[str, ...]], ...],
    split: bool,
) -> tuple[Program, ...]:
    return tuple(_compiled(shape, who, before, split) for shape in every or shapes(model_stages))


def _waits(shape: Shape, calls: Mapping[str, ModelStage], before: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What each call waits for: data, earlier calls of its group, and of another stage in its partition."""
    homes = {ms: shape.home(ms) for ms in calls.values()}
    names = list(calls)
    waits: dict[str, set[str]] = {}
    for index, name in enumerate(names):
        here, mine = homes[calls[name]], calls[name]
        turns = {
            other
            for other in names[:index]
            for there, its in [(homes[calls[other]], calls[other])]
            if there == here or (there[0] == here[0] and its.stage is not mine.stage)
        }
        waits[name] = before[name] | turns
    return waits


def _paths(
    levels: Sequence[ModelStage], calls: Mapping[str, ModelStage], waits: Mapping[str, set[str]]
) -> tuple[Terms, ...]:
    """Every path through the calls that no other contains."""
    number: dict[str, tuple[int, int]] = {}
    for name, model_stage in calls.items():
        level = levels.index(model_stage)
        number[name] = (level, 1 << sum(of[0] == level for of in number.values()))
    ends: dict[str, set[frozenset[str]]] = {}
    for name in calls:
        before = {path for other in waits[name] for path in ends[other]} or {frozenset()}
        ends[name] = _largest({path | {name} for path in before})
    every = _largest({path for paths in ends.values() for path in paths})
    found = set()
    for path in every:
        terms = [0] * len(levels)
        for name in path:
            level, bit = number[name]
            terms[level] |= bit
        found.add(tuple(terms))
    return tuple(sorted(found, reverse=True))


def _largest(sets: set[frozenset[str]]) -> set[frozenset[str]]:
    return {one for one in sets if not any(one < other for other in sets)}


def _selections(shape: Shape, levels: Sequence[ModelStage], split: bool) -> set[Terms]:
    """Model-stages whose devices are disjoint by the shape: of each partition one stage, of each of its groups one."""
    by_partition = []
    for groups in shape.partitions:
        stages = dict.fromkeys(group[0].stage for group in groups)
        by_partition.append(
            [chosen for stage in stages for chosen in product(*(g for g in groups if g[0].stage is stage))]
        )
    together = [(chosen,) for part in by_partition for chosen in part] if split else product(*by_partition)
    return {tuple(int(any(ms in part for part in chosen)) for ms in levels) for chosen in together}


def _sides(
    shape: Shape, levels: Sequence[ModelStage], devices: Sequence[Terms]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    beside = {(a, b) for each in devices for a, x in enumerate(each) for b, y in enumerate(each) if a != b and x and y}
    where, several = [shape.home(ms) for ms in levels], len(shape.partitions) > 1
    for partition, group in where:
        first = tuple(i for i, (p, g) in enumerate(where) if (p == partition if several else g == group))
        second = tuple(i for i in range(len(where)) if all((one, i) in beside for one in first))
        if second:
            return first, second
    return (), ()


def _stored(groups: Sequence[tuple[ModelStage, ...]], levels: Sequence[ModelStage]) -> set[Terms]:
    """What lies on one device of a partition: of each stage one group."""
    stages = dict.fromkeys(group[0].stage for group in groups)
    return {
        tuple(int(any(ms in group for group in chosen)) for ms in levels)
        for chosen in product(*([g for g in groups if g[0].stage is stage] for stage in stages))
    }


def _columns(family: Sequence[Terms], chosen: tuple[int, ...]) -> tuple[Column, ...]:
    """The columns of a family when `chosen` are, and how they follow from those without the last of `chosen`."""
    *earlier, new = chosen
    inside = _insides(family, chosen)
    before = _insides(family, tuple(earlier))
    place = {group: index for index, group in enumerate(dict.fromkeys(before.values()))}
    columns: dict[frozenset[Terms], tuple[set[tuple[int, int]], list[Terms]]] = {}
    for outside, insides in inside.items():
        sources, rests = columns.setdefault(insides, (set(), []))
        rests.append(outside)
        for terms in insides:
            key = terms[new]
            was = tuple(key if level == new else value for level, value in enumerate(outside))
            sources.add((place[before[was]] if earlier else -1, key))
    return tuple(Column(tuple(sorted(sources)), _maximal(rests)) for sources, rests in columns.values())


def _insides(family: Sequence[Terms], chosen: tuple[int, ...]) -> dict[Terms, frozenset[Terms]]:
    """By what a sum still lacks, the partial sums that lack it."""
    found: dict[Terms, set[Terms]] = {}
    for terms in family:
        lacking = tuple(0 if level in chosen else value for level, value in enumerate(terms))
        partial = tuple(value if level in chosen else 0 for level, value in enumerate(terms))
        found.setdefault(lacking, set()).add(partial)
    return {lacking: frozenset(partial) for lacking, partial in found.items()}


def _maximal(rests: Sequence[Terms]) -> tuple[Terms, ...]:
    """Those that no other contains: they alone can be the longest."""

    def within(one: Terms, other: Terms) -> bool:
        return one != other and all(a & b == a for a, b in zip(one, other, strict=True))

    return tuple(one for one in rests if not any(within(one, other) for other in rests))
