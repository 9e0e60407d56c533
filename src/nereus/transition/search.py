"""Whether any order of the steps fits in memory, where the greedy one ended: exact, and therefore only asked then.

A model-stage whose first group has committed, or that keeps a unit, is *settled*: all its other old units may leave,
and from then on it stores at most what it will in the end. So only the way to the first commit of each model-stage
matters: which single old unit it is built from, and in which order the model-stages are settled. Staging in host memory
takes that unit off its devices; the fewest possible are staged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations, product

from nereus.core import EMU, EMUSet, ModelStage, StateSchema
from nereus.transition.cheapest import cheapest
from nereus.transition.crowd import Crowd, Levels
from nereus.transition.deadlock import deadlocked
from nereus.transition.decompose import Build, LocalDAG, decompose
from nereus.transition.lead import GroupName, Lead
from nereus.transition.nodes import node_at

TRIES = 20_000
"""Groups looked at before the search gives up. Small clusters never get there."""

CHEAPER_TRIES, FEWER_TRIES, MANY_UNITS = 4_000, 500, 64
"""Groups looked at before the best order found so far is taken: fewer among so many units, where it rarely ends."""


@dataclass(frozen=True, slots=True)
class Found:
    """A way, or None; `proved`: None because there is none, not because the search gave up."""

    lead: Lead | None
    proved: bool
    least: bool = False
    """Whether no order that stages as few units moves fewer bytes."""


Groups = tuple[tuple[Build, Levels], ...]


@dataclass(frozen=True)
class _Choice:
    """One old unit that a model-stage could be built from, or None where one that is in nobody's way exists."""

    unit: EMU | None
    levels: Levels
    """What it stores."""
    decomposed: Callable[[], LocalDAG]
    tight: Collection[int]

    @cached_property
    def groups(self) -> Groups:
        """The groups that read it; most choices are never looked at."""
        return _groups(self.decomposed().builds, self.tight)


@dataclass(slots=True)
class _Case:
    start: EMUSet
    tight: Mapping[int, int]
    base: Levels
    """What is stored whatever is chosen."""
    strict: bool
    """Whether old units leave even where they are in nobody's way."""
    unread: list[EMU] = field(default_factory=list)
    choices: dict[ModelStage, list[_Choice]] = field(default_factory=dict)
    tries: int = TRIES


def search(
    start: EMUSet,
    goal: EMUSet,
    schemas: Mapping[ModelStage, StateSchema],
    crowd: Crowd,
    other_bytes: Mapping[int, int],
    host_bytes: Mapping[int, int],
    node_of: Mapping[int, int],
) -> Found:
    """A way through the devices that could run short. `host_bytes` by node; none: no staging.

    Old units that are in nobody's way stay at first. They can tie goal units together that fit one by one only, so in a
    second attempt all but one leave.
    """
    tries, tight = TRIES, crowd.tight
    ways = (*(() if deadlocked(crowd) else (False,)), *((True,) if host_bytes else ()))
    for staged in ways:
        for strict in (False, True):
            case = _Case(start, tight, {device: other_bytes.get(device, 0) for device in tight}, strict, tries=tries)
            found = _search(case, goal, schemas, host_bytes if staged else {}, node_of)
            if found is not None:
                few = len(crowd.old) + len(crowd.new) <= MANY_UNITS
                better = None if staged else cheapest(crowd, CHEAPER_TRIES if few else FEWER_TRIES)
                return Found(found, True) if better is None else Found(better.lead, True, better.least)
            tries = case.tries
    return Found(None, tries > 0)


def _search(
    case: _Case,
    goal: EMUSet,
    schemas: Mapping[ModelStage, StateSchema],
    host_bytes: Mapping[int, int],
    node_of: Mapping[int, int],
) -> Lead | None:
    in_the_end = dict(case.base)
    for ms in goal.model_stages:
        _enter(case, ms, goal, schemas[ms], in_the_end)
    if any(level > case.tight[device] for device, level in in_the_end.items()):
        return None
    open_ = sorted(case.choices, key=lambda ms: ms.sort_key)
    for count in range(1, len(open_) + 1) if host_bytes else (0,):
        for staged in combinations(open_, count):
            found = _with_staged(case, open_, staged, schemas, goal, host_bytes, node_of)
            if found is not None:
                return found
    return None


def _enter(case: _Case, ms: ModelStage, goal: EMUSet, schema: StateSchema, in_the_end: Levels) -> None:
    """Its choices if it is not settled; else what it keeps counts from the beginning. Adds what it stores at last."""
    units, wanted = case.start.of(ms), set(goal.of(ms))
    kept = [unit for unit in units if unit in wanted]
    left = [unit for unit in units if unit not in wanted]
    in_the_way = [unit for unit in left if case.strict or not case.tight.keys().isdisjoint(unit.devices)]
    plain = decompose(units, goal.of(ms), schema, in_the_way)
    for unit in goal.of(ms):
        _add(in_the_end, _levels(dict(zip(unit.devices, plain.pricing.stored(unit.layout), strict=True)), case.tight))
    for unit in kept:
        _add(case.base, _levels(dict(zip(unit.devices, plain.pricing.stored(unit.layout), strict=True)), case.tight))
    case.unread.extend(in_the_way)
    if kept or not plain.builds:
        return
    if len(in_the_way) < len(left):
        case.choices[ms] = [_Choice(None, {}, lambda: plain, case.tight)]
        return
    case.choices[ms] = []
    for unit in in_the_way:
        stored = dict(zip(unit.devices, plain.pricing.stored(unit.layout), strict=True))
        local = partial(_reading, units, goal.of(ms), schema, unit, in_the_way)
        case.choices[ms].append(_Choice(unit, _levels(stored, case.tight), local, case.tight))


def _reading(
    units: Sequence[EMU], goal: Sequence[EMU], schema: StateSchema, chosen: EMU, in_the_way: Sequence[EMU]
) -> LocalDAG:
    """The way that reads one unit alone of those in the way."""
    return decompose(units, goal, schema, {unit for unit in in_the_way if unit != chosen})


def _groups(builds: Sequence[Build], tight: Collection[int]) -> Groups:
    """Groups that differ on the devices that could run short; one that needs nothing there is as good as any."""
    found: dict[frozenset[tuple[int, int]], tuple[Build, Levels]] = {}
    for build in builds:
        levels = _levels(build.acquires, tight)
        if not levels:
            return ((build, levels),)
        found.setdefault(frozenset(levels.items()), (build, levels))
    return tuple(found.values())


def _with_staged(
    case: _Case,
    open_: Sequence[ModelStage],
    staged: Sequence[ModelStage],
    schemas: Mapping[ModelStage, StateSchema],
    goal: EMUSet,
    host_bytes: Mapping[int, int],
    node_of: Mapping[int, int],
) -> Lead | None:
    """The first way in which the units of exactly these model-stages go to host memory."""
    for chosen in product(*(case.choices[ms] for ms in open_)):
        if case.tries <= 0:
            return None
        taken: dict[ModelStage, _Choice] = dict(zip(open_, chosen, strict=True))
        units = [taken[ms].unit for ms in staged]
        if None in units or not _host_room([u for u in units if u is not None], schemas, host_bytes, node_of):
            continue
        for ms in staged:
            local = partial(decompose, case.start.of(ms), goal.of(ms), schemas[ms], case.start.of(ms))
            taken[ms] = _Choice(taken[ms].unit, {}, local, case.tight)
        order = _settle(case, taken)
        if order is not None:
            reading = {choice.unit for choice in taken.values()}
            offloaded = tuple(unit for unit in units if unit is not None)
            steps: list[EMU | GroupName] = [unit for unit in case.unread if unit not in reading]
            for build in order:
                ms = build.goals[0].model_stage
                steps.append((ms, frozenset(build.acquires)))
                steps.extend(u for u in (taken[ms].unit,) if u is not None and u not in offloaded)
            return Lead(offloaded, tuple(steps))
    return None


def _settle(case: _Case, taken: Mapping[ModelStage, _Choice]) -> list[Build] | None:
    """The groups that settle the model-stages one after another, by depth-first search over what is settled how."""
    level = dict(case.base)
    for choice in taken.values():
        _add(level, choice.levels)
    seen: set[frozenset[int]] = set()
    order: list[Build] = []

    def go(remaining: frozenset[ModelStage], settled: frozenset[int]) -> bool:
        if not remaining:
            return True
        if settled in seen:
            return False
        seen.add(settled)
        for ms in sorted(remaining, key=lambda ms: ms.sort_key):
            for build, wanted in taken[ms].groups:
                case.tries -= 1
                if case.tries <= 0:
                    return False
                if any(level[device] + size > case.tight[device] for device, size in wanted.items()):
                    continue
                change = _change(taken[ms], build, wanted, case.tight)
                _add(level, change)
                order.append(build)
                if go(remaining - {ms}, settled | {id(build)}):
                    return True
                order.pop()
                _add(level, {device: -size for device, size in change.items()})
        return False

    return order if go(frozenset(taken), frozenset()) else None


def _change(choice: _Choice, build: Build, wanted: Levels, tight: Collection[int]) -> Levels:
    """What the commit of a group and the Destroy of the old unit change; storage that is taken over stays."""
    change = dict(wanted)
    kept = _levels(build.kept_bytes, tight) if build.sources else {}
    for device, size in choice.levels.items():
        change[device] = change.get(device, 0) - size + kept.get(device, 0)
    return change


def _host_room(
    units: Sequence[EMU],
    schemas: Mapping[ModelStage, StateSchema],
    host_bytes: Mapping[int, int],
    node_of: Mapping[int, int],
) -> bool:
    left = dict(host_bytes)
    for unit in units:
        for device in unit.devices:
            node = node_at(device, node_of)
            left[node] = left.get(node, 0) - schemas[unit.model_stage].stored_bytes(unit, device)
    return all(size >= 0 for size in left.values())


def _levels(stored: Mapping[int, int], tight: Collection[int]) -> Levels:
    return {device: size for device, size in stored.items() if size and device in tight}


def _add(levels: Levels, more: Mapping[int, int]) -> None:
    for device, size in more.items():
        levels[device] = levels.get(device, 0) + size
