"""The shortest order of a small transition, by trying them all in the model of D6.4 and paper §6.1.

Knows nothing of the scheduler. A group builds goal units of one model-stage from whole units of it. It occupies the
devices of both and lasts as long as the busiest device: what the one that lacks most receives, or what all lack shared
by those that send, `far` times as long when several nodes take part. An old unit on a device of the goal that is read
leaves its common part there; one that has to be split serves all goal units on it together, once. Goal units are one
group that lie on such a unit, or that lie on nothing that is read and are no more devices than send; if `free`, any.
What is committed may be read. An old unit leaves, in no time, when no running group reads it and another whole one is
there; nobody has to read a particular unit. Memory counts what is whole and what is being built.

Sets of units are bits of an int; times are exact, in bytes / `SCALE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations
from math import gcd

from nereus.core import EMUSet, Layout, ModelStage, StateSchema
from tests.oracles.brute_force_orders import shared_bytes
from tests.oracles.cut import lacks_bytes

SCALE = 720_720
"""Divisible by up to sixteen senders."""


@dataclass(frozen=True, slots=True)
class Group:
    """Goal units that are being built, the units that are read, and when it ends."""

    end: int
    goals: int
    sources: int


@dataclass(frozen=True, slots=True)
class State:
    """What exists at one moment. `taken`: goal unit → the old units that it was built from on its own devices."""

    whole: int
    taken: tuple[tuple[int, int], ...] = ()
    running: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """A group that could start now, once the units `gone` have left."""

    goals: int
    sources: int
    gone: int
    lasts: int
    taken: tuple[tuple[int, int], ...]


class TooManyError(Exception):
    """More states than allowed."""


def shortest_bytes(
    start: EMUSet,
    goal: EMUSet,
    schemas: Mapping[ModelStage, StateSchema],
    capacity: Mapping[int, int],
    node_of: Mapping[int, int] | None = None,
    far: int = 1,
    limit_bytes: float = float("inf"),
    free: bool = False,
    states: int = 3_000,
) -> float | None:
    """The shortest span of all orders of at most `limit_bytes`, or None. Raises TooManyError beyond so many states."""
    case = _Case(start, goal, schemas, capacity, node_of or {}, far)
    search = _Search(case, limit_bytes * SCALE, free, states)
    search.explore(0, State(case.first))
    return None if search.best is None else search.best / SCALE


class _Case:
    """Units by number, and what does not change."""

    def __init__(
        self,
        start: EMUSet,
        goal: EMUSet,
        schemas: Mapping[ModelStage, StateSchema],
        capacity: Mapping[int, int],
        node_of: Mapping[int, int],
        far: int,
    ) -> None:
        self.units = list(dict.fromkeys([*start, *goal]))
        self.schemas, self.capacity, self.node_of, self.far = schemas, capacity, node_of, far
        bit = {unit: 1 << index for index, unit in enumerate(self.units)}
        self.first = sum(bit[unit] for unit in start)
        self.wanted = sum(bit[unit] for unit in goal) & ~self.first
        self.leaving = self.first & ~sum(bit[unit] for unit in goal)
        self.of = {ms: sum(bit[u] for u in self.units if u.model_stage == ms) for ms in goal.model_stages}
        self.devices = [set(unit.devices) for unit in self.units]
        self.stored = [{d: schemas[u.model_stage].stored_bytes(u, d) for d in u.devices} for u in self.units]
        self.split = sum(1 << index for index in members(self.leaving) if self._splits(index))
        self.alike = [self._class(index) for index in range(len(self.units))]
        self.lacks, self.shared = cache(self._lacks), cache(self._shared)
        self.least = {index: self._least(index) for index in members(self.wanted)}

    def _splits(self, index: int) -> bool:
        """Whether the unit is larger than what the layouts of its model-stage have in common."""
        layouts = [unit.layout for unit in self.units if unit.model_stage == self.units[index].model_stage]
        layout = self.units[index].layout
        return (layout.tp, layout.pp) != (gcd(*(each.tp for each in layouts)), gcd(*(each.pp for each in layouts)))

    def _class(self, index: int) -> tuple[ModelStage, Layout, tuple[int, ...]] | int:
        """Units on devices of their own and without a limit are as good as one another."""
        unit, devices = self.units[index], self.devices[index]
        others = any(devices & other for place, other in enumerate(self.devices) if place != index)
        if (
            others
            or not self.capacity.keys().isdisjoint(devices)
            or (self.far > 1 and not devices <= self.node_of.keys())
        ):
            return index
        return unit.model_stage, unit.layout, tuple(self.node_of.get(device, -1) for device in unit.devices)

    def _lacks(self, goal: int, read: int) -> tuple[int, int]:
        """The most that one device lacks, and what all lack, where the units `read` are read."""
        unit, sources = self.units[goal], [self.units[index] for index in members(read)]
        lacking = [lacks_bytes(self.schemas[unit.model_stage], sources, unit, device) for device in unit.devices]
        return max(lacking), sum(lacking)

    def _shared(self, old: int, goal: int, device: int) -> int:
        schema = self.schemas[self.units[goal].model_stage]
        return shared_bytes(schema, self.units[old], self.units[goal], device)

    def _least(self, goal: int) -> int:
        """The least that building it takes, whatever else happens."""
        most, _ = self.lacks(goal, self.on(goal, self.leaving))
        return most * SCALE * (self.far if len(self.nodes(1 << goal)) > 1 else 1)

    def on(self, goal: int, units: int) -> int:
        """Those of `units`, of the same model-stage, that lie on its devices."""
        mine = self.of[self.units[goal].model_stage] & units
        return sum(1 << index for index in members(mine) if self.devices[index] & self.devices[goal])

    def nodes(self, units: int) -> set[int]:
        """The nodes on which some units lie. A device without one is alone on its own."""
        return {self.node_of.get(device, ~device) for index in members(units) for device in self.devices[index]}

    def count(self, units: int) -> int:
        """Their devices."""
        return len(set[int]().union(*(self.devices[index] for index in members(units))))

    def lasts(self, goals: int, sources: int) -> tuple[int, bool]:
        """How long a group takes, and whether more senders would end it sooner."""
        lacking = [self.lacks(goal, self.on(goal, sources & self.leaving)) for goal in members(goals)]
        received, moved = max(most for most, _ in lacking), sum(all_ for _, all_ in lacking)
        sending = self.count(sources)
        busiest = max(received * SCALE, moved * SCALE // sending)
        crossing = self.far > 1 and len(self.nodes(goals | sources)) > 1
        return busiest * (self.far if crossing else 1), moved > received * sending

    def in_turn(self, goals: int, sources: int) -> int:
        """How long the same takes one goal unit after another."""
        return sum(self.lasts(1 << goal, sources)[0] for goal in members(goals))

    def short(self, state: State, start: Start) -> set[int]:
        """Devices of a group that have no room for it."""
        there = state.whole & ~start.gone | start.goals
        for group in state.running:
            there |= group.goals
        found = set()
        for device in {d for goal in members(start.goals) for d in self.devices[goal]} & self.capacity.keys():
            level = sum(self.stored[index].get(device, 0) for index in members(there))
            for goal, olds in (*state.taken, *start.taken):
                for old in members(olds & there):
                    if device in self.stored[goal] and device in self.stored[old]:
                        level -= self.shared(old, goal, device)
            if level > self.capacity[device]:
                found.add(device)
        return found


class _Search:
    """Depth first; what was reached before, and no later, is not gone on from."""

    def __init__(self, case: _Case, limit: float, free: bool, states: int) -> None:
        self.case, self.limit, self.free, self.left = case, limit, free, states
        self.best: int | None = None
        self.seen: dict[object, int] = {}

    def explore(self, now: int, state: State) -> None:
        """Everything that can follow."""
        case = self.case
        if not state.running and case.wanted & ~state.whole == 0:
            self.best, self.limit = now, now - 1
            return
        if self._at_least(now, state) > self.limit:
            return
        ahead = tuple((group.end - now, group.goals, group.sources) for group in state.running)
        key = (state.whole, state.taken, ahead)
        if self.seen.get(key, now + 1) <= now:
            return
        self.seen[key] = now
        self.left -= 1
        if self.left < 0:
            raise TooManyError
        for start in self._starts(state):
            running = (*state.running, Group(now + start.lasts, start.goals, start.sources))
            taken = tuple(sorted((*state.taken, *start.taken)))
            ordered = tuple(sorted(running, key=lambda group: (group.end, group.goals)))
            self.explore(now, State(state.whole & ~start.gone, taken, ordered))
        if state.running:
            end = state.running[0].end
            whole = state.whole
            for group in state.running:
                whole |= group.goals if group.end == end else 0
            self.explore(end, State(whole, state.taken, tuple(g for g in state.running if g.end > end)))

    def _at_least(self, now: int, state: State) -> int:
        """What no continuation ends before: each device builds one after another."""
        busy: dict[int, int] = {}
        for group in state.running:
            for index in members(group.goals | group.sources):
                busy.update(dict.fromkeys(self.case.devices[index], group.end))
        found = max((group.end for group in state.running), default=now)
        for goal in members(self._open(state)):
            for device in self.case.devices[goal]:
                busy[device] = busy.get(device, now) + self.case.least[goal]
                found = max(found, busy[device])
        return found

    def _open(self, state: State) -> int:
        """Goal units that are not there and not being built."""
        found = self.case.wanted & ~state.whole
        for group in state.running:
            found &= ~group.goals
        return found

    def _starts(self, state: State) -> Iterator[Start]:
        case, busy, reading = self.case, set[int](), 0
        for group in state.running:
            reading |= group.sources
            for index in members(group.goals | group.sources):
                busy |= case.devices[index]
        free = [index for index in range(len(case.units)) if not busy & case.devices[index]]
        idle = sum(1 << index for index in free)
        for stage in case.of.values():
            open_ = self._open(state) & stage & idle
            for goals in subsets(open_):
                if not self._first_alike(goals, open_) or self._overlap(goals):
                    continue
                for start in self._of(goals, state, state.whole & stage & idle):
                    yield from self._with_room(start, state, reading)

    def _first_alike(self, goals: int, open_: int) -> bool:
        """Whether no unit that is left out comes before one that is alike."""
        left_out = {self.case.alike[index]: index for index in reversed(list(members(open_ & ~goals)))}
        return all(index < left_out.get(self.case.alike[index], index + 1) for index in members(goals))

    def _overlap(self, goals: int) -> bool:
        return any(self.case.devices[a] & self.case.devices[b] for a, b in combinations(members(goals), 2))

    def _of(self, goals: int, state: State, units: int) -> Iterator[Start]:
        """Every set of units that some goal units could be built from."""
        case = self.case
        local = 0
        for goal in members(goals):
            local |= case.on(goal, units & case.leaving)
        used = 0
        for _, olds in state.taken:
            used |= olds & case.split
        several = bool(goals & (goals - 1))
        tied = several and self._tied(goals, case.leaving & case.split)
        for inside in (0, *subsets(local)):
            if inside & used or (several and inside and not (tied or self.free)):
                continue
            taken = tuple((goal, case.on(goal, inside)) for goal in members(goals) if case.on(goal, inside))
            for helpers in self._helpers(goals, inside, units & ~local):
                sources = inside | helpers
                if several and not (tied or self.free) and case.count(goals) > case.count(sources):
                    continue
                lasts, _ = case.lasts(goals, sources)
                if several and not self._tied(goals, inside & case.split) and lasts >= case.in_turn(goals, sources):
                    continue  # one after another is as good
                yield Start(goals, sources, 0, lasts, taken)

    def _tied(self, goals: int, units: int) -> bool:
        """Whether the goal units hang together through `units` on which several lie."""
        case = self.case
        joined, left = goals & -goals, goals & ~(goals & -goals)
        while left:
            near = 0
            for goal in members(joined):
                near |= case.on(goal, units)
            more = sum(1 << goal for goal in members(left) if case.on(goal, near))
            if not more:
                return False
            joined, left = joined | more, left & ~more
        return True

    def _helpers(self, goals: int, inside: int, units: int) -> Iterator[int]:
        """Further units to read: as many as end it sooner, the first of those that are alike."""
        case = self.case
        stack = [(inside, 0, list(members(units)))]
        while stack:
            sources, helpers, rest = stack.pop()
            if sources:
                yield helpers
                if not case.lasts(goals, sources)[1]:
                    continue
            skipped: set[object] = set()
            for place, index in enumerate(rest):
                if case.alike[index] in skipped:
                    continue
                skipped.add(case.alike[index])
                stack.append((sources | 1 << index, helpers | 1 << index, rest[place + 1 :]))

    def _with_room(self, start: Start, state: State, reading: int) -> Iterator[Start]:
        """The same with the least sets of old units that have to leave before."""
        case = self.case
        short = case.short(state, start)
        if not short:
            yield start
            return
        candidates = state.whole & case.leaving & ~start.sources & ~reading
        candidates = sum(1 << index for index in members(candidates) if case.devices[index] & short)
        enough: list[int] = []
        for gone in subsets(candidates):
            if any(gone & each == each for each in enough) or self._takes_last(gone, state.whole):
                continue
            after = Start(start.goals, start.sources, gone, start.lasts, start.taken)
            if not case.short(state, after):
                enough.append(gone)
                yield after

    def _takes_last(self, gone: int, whole: int) -> bool:
        """Whether a model-stage would be left without a whole unit."""
        return any(gone & stage and not whole & stage & ~gone for stage in self.case.of.values())


def members(units: int) -> Iterator[int]:
    """The numbers of a set."""
    while units:
        yield (units & -units).bit_length() - 1
        units &= units - 1


def subsets(units: int) -> Iterable[int]:
    """All sets of some of them, small ones first, without the empty one."""
    bits = [1 << index for index in members(units)]
    return (sum(chosen) for chosen in chain.from_iterable(combinations(bits, n) for n in range(1, len(bits) + 1)))
