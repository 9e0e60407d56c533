"""Carries the steps of a transition out on paper: who reads whom, in which order, until when (paper §6.1, D6.4).

The model: a group occupies the devices of its goal units and of what it reads, and takes as long as its busiest device
sends or receives. Units that a group has built are read like any other, so new replicas forward. Releasing takes no
time and goes before acquiring.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

from nereus.core import EMU, Layout
from nereus.transition.decompose import Build, LocalDAG
from nereus.transition.holders import Holder, Part, duration
from nereus.transition.leaving import Leaving
from nereus.transition.progress import Progress
from nereus.transition.room import Room, Step
from nereus.transition.rule import Rule
from nereus.transition.site import Site
from nereus.transition.waiting import Waiting


@dataclass(frozen=True, slots=True)
class Stuck:
    """No step can start: a group that waits, and the bytes it is short of by device; none: of a unit to read."""

    build: Build
    short_bytes: Mapping[int, int]


class Run:
    """One pass. `order` and `span_bytes`, when the last step ends, are complete once `walk` has returned None."""

    def __init__(
        self, locals_: Sequence[LocalDAG], room: Room, site: Site, rule: Rule, limit_bytes: float = inf
    ) -> None:
        tight = room.capacity.keys() if rule.prudent else frozenset[int]()
        parts = {local.model_stage: Part(local, site, rule.fresh, tight) for local in locals_}
        waiting = Waiting(parts, site, rule.longest_first)
        self.site = site
        self._tight = bool(room.capacity)
        """Whether memory could run short; where not, no group loses what it reads."""
        self.span_bytes = 0.0
        self.late = False
        """Whether it has been given up: its span would be no shorter than the limit."""
        self._limit_bytes = limit_bytes
        self._so_far = Progress(parts, room, rule, waiting)
        self.leaving = Leaving(self._so_far)
        self.room, self._waiting, self._parts = room, waiting, parts
        self._running: list[tuple[float, int, int, Build]] = []
        """End, index, devices as bits and group of those that have started."""
        self._bits = self._so_far.bits
        self._bits += [site.joined(build.goals) for local in locals_ for build in local.builds]
        sizes = [build.received_bytes for local in locals_ for build in local.builds]
        if any(before < after for before, after in pairwise(sizes)):
            self._so_far.minds.add("longest_first")
        if room.capacity:
            self._so_far.minds.add("prudent")

    @property
    def order(self) -> list[Step]:
        """The steps so far."""
        return self._so_far.order

    @property
    def steps(self) -> dict[int, Step]:
        """id of a group → its step."""
        return self._so_far.steps

    @property
    def minds(self) -> Set[str]:
        """As in `Progress`."""
        return self._so_far.minds

    def walk(self) -> Stuck | None:
        """Everything, or as far as it goes, or until it is late."""
        waiting, running = self._waiting, self._running
        for part in self._parts.values():
            self.leaving.dismiss(part.going)
        while True:
            while (waiting.ready or waiting.hungry) and not self.late:
                while waiting.ready:
                    self._try(heappop(waiting.ready)[2])
                for part in waiting.fed() if waiting.hungry else ():
                    self._serve(part)
            if self.late:
                return None
            if running and waiting.short and self.leaving.in_time():
                continue
            if running:
                self._commit(*heappop(running))
                while running and running[0][0] <= self.span_bytes:
                    self._commit(*heappop(running))
            elif not self.leaving.give_up_sources():
                first = waiting.first()
                return None if first is None else Stuck(first, self.room.short(first))

    def hold_back(self, steps: Collection[Holder | Build]) -> list[Build]:
        """Nothing starts by itself. The groups that would have, but for those of `steps`."""
        others = [build for build in self._waiting.queued() if build not in steps]
        self._waiting.clear()
        return others

    def queue(self, builds: Iterable[Build]) -> None:
        """They start by themselves."""
        for build in builds:
            self._waiting.queue(build)

    def idle(self, build: Build) -> bool:
        """Whether the devices of a group and of what it reads are free."""
        used = _joined(self._bits[build.index], self._holders(build))
        return not self._so_far.busy & used

    def begin(self, build: Build) -> bool:
        """Start a group that has room and free devices, if it reads certain units or there is one to read."""
        part = self.part(build.goals[0])
        sources = self._holders(build)
        if not sources:
            sources = self._choose(part, build)
            if not sources:
                return False
            self._read(part, build, sources)
        self._start(build, sources, _joined(self._bits[build.index], sources))
        return True

    def commit_next(self) -> None:
        """What ends first ends."""
        assert self._running, "nothing can start, though the order was checked"
        self._commit(*heappop(self._running))

    def reading(self, holder: Holder) -> bool:
        """Whether a group reads the unit now."""
        return any(build in holder.groups for *_, build in self._running)

    def part(self, unit: EMU) -> Part:
        """The model-stage of a unit."""
        return self._parts[unit.model_stage]

    def holder(self, unit: EMU) -> Holder:
        """A unit of the start."""
        return self.part(unit).old[unit.devices]

    def sub(self, build: Build) -> Layout:
        """T_sub of the model-stage that a group builds."""
        return self._waiting.part(build).local.sub

    def destroy_names(self) -> dict[int, str]:
        """id of a unit that goes → that of its Destroy."""
        return {
            id(holder): f"{name}{index}"
            for name, part in [(f"{ms}/destroy", part) for ms, part in self._parts.items()]
            for index, holder in enumerate(part.going)
        }

    def _serve(self, part: Part) -> None:
        """Start groups that may read any unit, as long as there are units to read."""
        waiting: list[Build] = []
        for build in part.shy:
            heappush(part.queue, self._waiting.entry(build))
        part.shy = []
        while part.queue:
            build = heappop(part.queue)[2]
            if not self._can_start(build, self._bits[build.index]):
                continue
            if self.site.far > 1 and part.worth_waiting(build, self.span_bytes):
                waiting.append(build)
                continue
            sources = self._choose(part, build)
            if not sources:
                waiting.append(build)
                break
            self._read(part, build, sources)
            waiting.extend(self._join(part, build, sources))
            if not part.open:
                self.leaving.dismiss(part.going)
            self._start(build, sources, _joined(self._bits[build.index], sources))
        for build in waiting:
            heappush(part.queue, self._waiting.entry(build))

    def _read(self, part: Part, build: Build, sources: tuple[Holder, ...]) -> None:
        """A group that may read any unit reads these."""
        build.sources = tuple(holder.unit for holder in sources)
        for holder in sources:
            holder.groups.append(build)
            holder.pending += 1
        part.open -= 1

    def _join(self, part: Part, build: Build, sources: Sequence[Holder]) -> list[Build]:
        """Units with more devices than are to be built serve several new ones at once, if there are more than units.

        Returns those that could start, but not together with `build`.
        """
        apart: list[Build] = []
        share = sum([len(holder.unit.devices) for holder in sources]) // len(build.acquires) - 1
        if share > 0:
            share = min(share, part.open // (part.old_units() + 1))
        senders = _joined(0, sources) if share > 0 else 0
        while share > 0 and part.queue:
            other = heappop(part.queue)[2]
            if not self._can_start(other, self._bits[other.index]):
                continue
            if senders & self._bits[other.index]:
                apart.append(other)
                continue
            part.open -= 1
            part.risky.discard(id(other))
            self.steps[id(other)] = self.steps.setdefault(id(build), Step(build))
            build.goals = (*build.goals, *other.goals)
            build.acquires = build.acquires | other.acquires
            self._bits[build.index] |= self._bits[other.index]
            build.received_bytes = max(build.received_bytes, other.received_bytes)
            build.moved_bytes += other.moved_bytes
            share -= 1
        return apart

    def _can_start(self, build: Build, used: int, sources: Sequence[Holder] = ()) -> bool:
        """Whether memory and the devices `used` are free; if not, the group is left with what it waits for."""
        short = self.room.short(build) if self._tight else {}
        if short and self.leaving.dismiss([h for device in short for h in self.leaving.on(device)], build):
            short = self.room.short(build)
        if short:
            part, device = self._waiting.part(build), next(iter(short))
            own = any(holder.part is part for holder in self.leaving.on(device))
            if own and not build.sources:
                part.shy.append(build)
            else:
                self._waiting.lack(build, device)
            return False
        busy = self._so_far.busy & used
        if busy:
            read = {device for holder in sources for device in holder.unit.devices}
            devices: Iterable[int] = build.acquires.keys() | read if read else build.acquires
            self._waiting.rest(build, self.site.first(devices, busy))
            return False
        return True

    def _try(self, build: Build) -> None:
        """Start a group that reads certain units; it may have lost all of them since it was queued, or be no more."""
        if not build.goals:
            return
        if not build.sources:
            self._waiting.queue(build)
            return
        sources = self._holders(build)
        used = _joined(self._bits[build.index], sources)
        if self._can_start(build, used, sources):
            self._start(build, sources, used)

    def _holders(self, build: Build) -> tuple[Holder, ...]:
        """The units that a group reads, all of the start, if it is known to read certain ones."""
        old = self._waiting.part(build).old
        return tuple([old[unit.devices] for unit in build.sources])

    def _choose(self, part: Part, build: Build) -> tuple[Holder, ...]:
        """Whole units for a group that may read any, as many as keep its devices busy."""
        resting: list[tuple[int, Holder]] = []
        if part.mixed:
            self._so_far.minds.add("fresh")
        found = part.take(build, self._so_far.busy, resting)
        for device, holder in resting:
            self._waiting.rest(holder, device)
        return found

    def _start(self, build: Build, sources: tuple[Holder, ...], used: int) -> None:
        part, steps = self._waiting.part(build), self._so_far.steps
        step = steps.get(id(build))
        if step is None:
            step = steps[id(build)] = Step(build)
        step.sources = sources
        if self._tight:
            self.room.acquire(step, steps)
        self._so_far.order.append(step)
        self._so_far.busy |= used
        end = self.span_bytes + duration(build, sources, self.site)
        self.late |= end >= self._limit_bytes
        if self.site.far > 1 and (part.open or self._tight):
            part.announce(build, sources, self.span_bytes, end)
        heappush(self._running, (end, build.index, used, build))
        if part.risky and id(build) in part.risky:
            part.risky.remove(id(build))
            if not part.open and not part.risky:
                self.leaving.dismiss(part.going)

    def _commit(self, end: float, _: int, used: int, build: Build) -> None:
        """The goal units are whole; sources are free again; what nobody needs any more leaves."""
        self.span_bytes = end
        part, sources = self._waiting.part(build), self._so_far.steps[id(build)].sources
        part.alive += len(build.goals)
        first, part.settled = not part.settled, True
        self._so_far.busy &= ~used
        for holder in sources:
            holder.pending -= 1
        if part.open or self._tight:  # else nobody will read it
            made = [Holder(goal, part, maker=build) for goal in build.goals]
            part.holders += made
            part.free((*sources, *made))
        self._waiting.free(used, build)
        self.leaving.dismiss(part.going if first else sources)
        if part.queue or part.shy:
            self._waiting.serve(part)


def _joined(bits: int, holders: Iterable[Holder]) -> int:
    """Those devices and those of some units."""
    for holder in holders:
        bits |= holder.spot.devices
    return bits
