"""Carries the steps of a transition out on paper: who reads whom, in which order, until when (paper §6.1, D6.4).

The model: a group occupies the devices of its goal units and of what it reads, and takes as long as its busiest device
sends or receives. Units that a group has built are read like any other, so new replicas forward. Releasing takes no
time and goes before acquiring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

from nereus.core import EMU, Layout, ModelStage
from nereus.transition.decompose import Build, LocalDAG
from nereus.transition.holders import Holder, Part, Site
from nereus.transition.room import Room, Step


@dataclass(frozen=True, slots=True)
class Rule:
    """Groups start in stage order, or the `longest_first`. A unit whose memory is waited for leaves as soon as there is
    another copy; if `patient`, not before it has been read once, where there is something to be read it for. One that
    makes room for its own model-stage leaves when another can be read at once; if `eager`, when another is there. Units
    that groups wait to read leave when nothing else can start and nothing runs; if `early`, while others still run.
    """

    longest_first: bool = False
    patient: bool = False
    eager: bool = False
    early: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """In what it differs from the first rule."""
        return tuple(name for name in ("longest_first", "patient", "eager", "early") if getattr(self, name))


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
        self.order: list[Step] = []
        self.steps: dict[int, Step] = {}
        self.span_bytes = 0.0
        self.site = site
        self.minds: set[str] = set()
        """Fields of the rule that have made a difference, or would have: a rule that differs in others goes alike."""
        self._room, self._rule, self._limit_bytes = room, rule, limit_bytes
        self.late = False
        """Whether it has been given up: its span would be no shorter than the limit."""
        self._parts: dict[ModelStage, Part] = {local.model_stage: Part(local, site) for local in locals_}
        self._busy: set[int] = set()
        self._resting: dict[int, list[Build | Holder]] = defaultdict(list)
        """Device → what waits until it is free."""
        self._short: dict[int, list[Build]] = {}
        """Device → groups that wait for memory on it."""
        self._ready: list[tuple[int, int, Build]] = []
        self._hungry: dict[int, Part] = {}
        """Model-stages whose groups may find units to read."""
        self._running: list[tuple[float, int, Build]] = []
        self._part_of: list[Part] = []
        for part in self._parts.values():
            for build in part.local.builds:
                build.index = len(self._part_of)
                self._part_of.append(part)
                self._queue(build)
        sizes = [build.received_bytes for part in self._parts.values() for build in part.local.builds]
        if any(before < after for before, after in pairwise(sizes)):
            self.minds.add("longest_first")
        self._leaving: dict[int, list[Holder]] = defaultdict(list)
        """Device that may run short → units on it that go."""
        for holder in (h for part in self._parts.values() for h in part.holders.values() if h.goes):
            for device in room.capacity.keys() & holder.unit.devices if room.capacity else ():
                self._leaving[device].append(holder)

    def walk(self) -> Stuck | None:
        """Everything, or as far as it goes, or until it is late."""
        self._dismiss(holder for part in self._parts.values() for holder in part.holders.values())
        while True:
            while (self._ready or self._hungry) and not self.late:
                while self._ready:
                    self._try(heappop(self._ready)[2])
                hungry, self._hungry = self._hungry, {}
                for part in sorted(hungry.values(), key=lambda part: part.local.model_stage.sort_key):
                    self._serve(part)
            if self.late:
                return None
            if self._running and self._short and self._in_time():
                continue
            if self._running:
                self._commit(*heappop(self._running))
                while self._running and self._running[0][0] <= self.span_bytes:
                    self._commit(*heappop(self._running))
            elif not self._give_up_sources():
                waiting = [build for builds in self._short.values() for build in builds]
                for part in self._parts.values():
                    waiting.extend((*part.shy, *(entry[2] for entry in part.queue)))
                if not waiting:
                    return None
                return Stuck(waiting[0], self._room.short(waiting[0]))

    def lead(self, unread: Iterable[EMU], offloaded: Iterable[EMU], way: Sequence[Build]) -> None:
        """Go a known way first: `unread` leave, `offloaded` go to host memory, each group of `way` starts alone."""
        for unit in unread:
            self._destroy(self._parts[unit.model_stage].holders[unit])
        for unit in offloaded:
            self._offload(self._parts[unit.model_stage].holders[unit])
        queues = [self._ready, *(part.queue for part in self._parts.values())]
        others = [entry[2] for queue in queues for entry in queue if entry[2] not in way]
        for build in way:
            for queue in queues:
                queue.clear()
            self._queue(build)
            self._serve(self._part(build))
            for entry in self._ready:
                self._try(entry[2])
            assert self._running, f"{build.name} cannot start, though the order was checked"
            self._commit(*heappop(self._running))
            for holder in [h for h in self._part(build).holders.values() if h.goes and not h.gone]:
                if not self._leaving.keys().isdisjoint(holder.unit.devices):
                    self._drop(holder)
        for queue in queues:
            queue.clear()
        for build in others:
            self._queue(build)

    def sub(self, build: Build) -> Layout:
        """T_sub of the model-stage that a group builds."""
        return self._part(build).local.sub

    def destroy_names(self) -> dict[EMU, str]:
        """Ids of the Destroys, by unit."""
        return {
            unit: f"{ms}/destroy{index}"
            for ms, part in self._parts.items()
            for index, unit in enumerate(part.local.left)
        }

    def _part(self, build: Build) -> Part:
        return self._part_of[build.index]

    def _entry(self, build: Build) -> tuple[int, int, Build]:
        return (-build.received_bytes if self._rule.longest_first else 0, build.index, build)

    def _queue(self, build: Build) -> None:
        if build.sources:
            heappush(self._ready, self._entry(build))
        else:
            part = self._part_of[build.index]
            heappush(part.queue, self._entry(build))
            self._hungry[id(part)] = part

    def _serve(self, part: Part) -> None:
        """Start groups that may read any unit, as long as there are units to read."""
        waiting: list[Build] = []
        for build in part.shy:
            heappush(part.queue, self._entry(build))
        part.shy = []
        while part.queue:
            build = heappop(part.queue)[2]
            if not self._can_start(build, build.acquires.keys()):
                continue
            if self.site.far > 1 and part.worth_waiting(build, self.span_bytes):
                waiting.append(build)
                continue
            sources = self._choose(part, build)
            if not sources:
                waiting.append(build)
                break
            build.sources = tuple(holder.unit for holder in sources)
            for holder in sources:
                holder.groups.append(build)
                holder.pending += 1
            part.open -= 1
            waiting.extend(self._join(part, build, {d for holder in sources for d in holder.unit.devices}))
            if not part.open:
                self._dismiss(part.holders.values())
            self._start(build, sources)
        for build in waiting:
            heappush(part.queue, self._entry(build))

    def _join(self, part: Part, build: Build, senders: Set[int]) -> list[Build]:
        """Units with more devices than are to be built serve several new ones at once, if there are more than units.

        Returns those that could start, but not together with `build`.
        """
        apart: list[Build] = []
        share = len(senders) // len(build.acquires) - 1
        if share > 0:
            share = min(share, part.open // (part.old_units() + 1))
        while share > 0 and part.queue:
            other = heappop(part.queue)[2]
            if not self._can_start(other, other.acquires.keys()):
                continue
            if not senders.isdisjoint(other.acquires):
                apart.append(other)
                continue
            part.open -= 1
            self.steps[id(other)] = self.steps.setdefault(id(build), Step(build))
            build.goals = (*build.goals, *other.goals)
            build.acquires = build.acquires | other.acquires
            build.received_bytes = max(build.received_bytes, other.received_bytes)
            build.moved_bytes += other.moved_bytes
            share -= 1
        return apart

    def _can_start(self, build: Build, devices: Set[int]) -> bool:
        """Whether memory and devices are free; if not, the group is left with what it waits for."""
        short = self._room.short(build)
        if short:
            self._dismiss([holder for device in short for holder in self._leaving.get(device, ())], build)
            short = self._room.short(build)
        if short:
            part = self._part(build)
            own = any(
                holder.unit in part.holders for holder in self._leaving.get(next(iter(short)), ()) if not holder.gone
            )
            if own and not build.sources:
                part.shy.append(build)
            else:
                self._short.setdefault(next(iter(short)), []).append(build)
            return False
        if not self._busy.isdisjoint(devices):
            self._resting[next(device for device in devices if device in self._busy)].append(build)
            return False
        return True

    def _try(self, build: Build) -> None:
        """Start a group that reads certain units; it may have lost all of them since it was queued."""
        if not build.sources:
            self._queue(build)
            return
        sources = tuple(self._part(build).holders[unit] for unit in build.sources)
        if self._can_start(build, build.acquires.keys() | {d for holder in sources for d in holder.unit.devices}):
            self._start(build, sources)

    def _choose(self, part: Part, build: Build) -> tuple[Holder, ...]:
        """Whole units for a group that may read any, as many as keep its devices busy."""
        resting: list[tuple[int, Holder]] = []
        found = part.take(build, self._busy, resting)
        for device, holder in resting:
            self._resting[device].append(holder)
        return found

    def _start(self, build: Build, sources: tuple[Holder, ...]) -> None:
        part = self._part(build)
        step = self.steps.setdefault(id(build), Step(build))
        step.sources = sources
        self._room.acquire(step, self.steps)
        self.order.append(step)
        self._busy.update(build.acquires, *(holder.unit.devices for holder in sources))
        end = self.span_bytes + self.site.duration(build, sources)
        self.late |= end >= self._limit_bytes
        part.announce(build, sources, self.span_bytes, end)
        heappush(self._running, (end, build.index, build))

    def _commit(self, end: float, _: int, build: Build) -> None:
        """The goal units are whole; sources are free again; what nobody needs any more leaves."""
        self.span_bytes = end
        part, sources = self._part(build), self.steps[id(build)].sources
        made = [Holder(goal, maker=build) for goal in build.goals]
        part.holders.update((holder.unit, holder) for holder in made)
        part.alive += len(made)
        first, part.settled = not part.settled, True
        devices = set(build.acquires).union(*(holder.unit.devices for holder in sources))
        self._busy -= devices
        for holder in sources:
            holder.pending -= 1
        for holder in (*sources, *made):
            part.free(holder)
        for device in () if self._resting.keys().isdisjoint(devices) else self._resting.keys() & devices:
            for waiting in self._resting.pop(device):
                if isinstance(waiting, Holder):
                    other = self._parts[waiting.unit.model_stage]
                    other.free(waiting)
                    self._hungry[id(other)] = other
                else:
                    self._queue(waiting)
        self._dismiss(part.holders.values() if first else sources)
        self._hungry[id(part)] = part

    def _dismiss(self, holders: Iterable[Holder], wanted: Build | None = None) -> None:
        """Destroy those that nobody has to read any more; `wanted` waits for their memory."""
        for holder in list(holders):
            if holder.goes and not holder.gone and not holder.pending:
                part = self._parts[holder.unit.model_stage]
                if part.spare and (not part.open or self._sooner(part, holder, wanted)):
                    self._destroy(holder)

    def _sooner(self, part: Part, holder: Holder, wanted: Build | None) -> bool:
        """Whether a unit that new replicas could still be read from leaves for its memory."""
        if wanted is None and self._short.keys().isdisjoint(holder.unit.devices):
            return False
        if wanted is not None and self._part(wanted) is part:  # what leaves is not read any more: another must be
            if part.has_another(holder, self._busy):
                return True
            self.minds.add("eager")
            return self._rule.eager
        if holder.groups:
            return True
        self.minds.add("patient")
        return not self._rule.patient

    def _in_time(self) -> bool:
        """Whether units that groups wait to read leave while others still run: only if `early`."""
        self.minds.add("early")
        return self._rule.early and self._give_up_sources()

    def _give_up_sources(self) -> bool:
        """When nothing can start: units that groups wait to read leave, those that cost least where room is short.

        Of each model-stage at most half of its units, at least one: what is built instead has to be read somewhere.
        """
        waiting = [*self._short.values(), *(part.shy for part in self._parts.values())]
        builds = sorted({b.index: b for builds in waiting for b in builds}.values(), key=self._entry)
        left = {id(part): max(1, part.alive // 2) for part in self._parts.values()}
        dropped = False
        for build in builds:
            holder = self._most_useful(self._room.short(build), left)
            if holder is not None:
                left[id(self._parts[holder.unit.model_stage])] -= 1
                self._drop(holder)
                if dropped:
                    self.minds.add("eager")
                dropped = True
                if self._rule.eager:
                    self.minds.add("eager")
                    break
        return dropped

    def _most_useful(self, short: Mapping[int, int], left: Mapping[int, int]) -> Holder | None:
        """The unit whose Destroy frees most of what is `short` for what has to be received instead, of model-stages
        that have another and some `left`."""
        best: tuple[tuple[float, int], Holder] | None = None
        for holder in dict.fromkeys(h for device in short for h in self._leaving.get(device, ()) if not h.gone):
            part = self._parts[holder.unit.model_stage]
            if part.alive > 1 and left[id(part)] > 0:
                releases = self._releases(holder, drop=True)
                gain = sum(min(releases[device], short[device]) for device in releases.keys() & short.keys())
                worth = (-self._loss(holder) / gain, gain) if gain else (-inf, 0)
                if gain and (best is None or worth > best[0]):
                    best = (worth, holder)
        return None if best is None else best[1]

    def _loss(self, holder: Holder) -> int:
        """Bytes that groups receive more at most, all together, if they cannot read it."""
        waiting = (build for build in holder.groups if id(build) not in self.steps)
        return sum(self._part(build).local.loss(build, holder.unit) for build in waiting)

    def _drop(self, holder: Holder) -> None:
        """No group that has not started reads the unit any more, and it leaves."""
        part = self._parts[holder.unit.model_stage]
        for build in [build for build in holder.groups if id(build) not in self.steps]:
            part.local.drop(build, holder.unit)
            holder.groups.remove(build)
            if not build.sources:
                part.open += 1
                for other in part.holders.values():
                    part.free(other)
        holder.pending = 0
        self._destroy(holder)

    def _releases(self, holder: Holder, drop: bool = False) -> dict[int, int]:
        """Bytes that its Destroy frees by device: storage that goal units have taken over stays."""
        local, unit = self._parts[holder.unit.model_stage].local, holder.unit
        if holder.offloaded:
            return {}
        found = dict(zip(unit.devices, local.pricing.stored(unit.layout), strict=True))
        for build in holder.groups:
            if not drop or id(build) in self.steps:
                for device in build.kept_bytes.keys() & found.keys():
                    found[device] -= build.kept_bytes[device]
        return found

    def _destroy(self, holder: Holder) -> None:
        part = self._parts[holder.unit.model_stage]
        step = Step(holder=holder, releases=self._releases(holder))
        holder.gone = True
        part.alive -= 1
        self._free(step)

    def _offload(self, holder: Holder) -> None:
        step = Step(holder=holder, offload=True, releases=self._releases(holder))
        holder.offloaded = True
        self._free(step)

    def _free(self, step: Step) -> None:
        """Enter a Destroy or Offload; what waited for its memory is looked at again."""
        self.order.append(step)
        self._room.release(step)
        for device in self._short.keys() & step.releases.keys() if self._short else ():
            for build in self._short.pop(device):
                self._queue(build)
        part = self._parts[step.holder.unit.model_stage] if step.holder is not None else None
        if part is not None and part.shy:
            self._hungry[id(part)] = part
