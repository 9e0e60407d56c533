"""Which units leave, when, and what that frees: those that nobody needs, and those whose room is needed more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf

from nereus.transition.decompose import Build
from nereus.transition.holders import Holder, Part
from nereus.transition.progress import Progress
from nereus.transition.room import Step


class Leaving:
    """The Destroys and Offloads of one run."""

    def __init__(self, progress: Progress) -> None:
        self._run = progress

    @cached_property
    def _on(self) -> dict[int, list[Holder]]:
        """Device that may run short → units on it that go and are still there."""
        found: dict[int, list[Holder]] = {}
        for part in self._run.parts.values():
            for holder in [holder for holder in part.going if not holder.gone]:
                for device in self._run.room.capacity.keys() & holder.unit.devices:
                    found.setdefault(device, []).append(holder)
        return found

    def on(self, device: int) -> list[Holder]:
        """Units that go and are still there, on a device that may run short."""
        return self._on.get(device, [])

    def dismiss(self, holders: Iterable[Holder], wanted: Build | None = None) -> bool:
        """Destroy those that nobody has to read any more; `wanted` waits for their memory. Whether there were any."""
        found = False
        for holder in holders:
            if holder.goes and not holder.gone and not holder.pending:
                part = holder.part
                if part.spare and (not (part.open or part.risky) or self._may_leave(part, holder, wanted)):
                    self.destroy(holder)
                    found = True
        return found

    def _may_leave(self, part: Part, holder: Holder, wanted: Build | None) -> bool:
        """Whether a unit that a group could still read leaves for its memory."""
        short = self._run.waiting.short
        if wanted is None and (not short or short.keys().isdisjoint(holder.unit.devices)):
            return False
        if part.open and wanted is not None and self._run.part(wanted) is part:  # another unit must be read
            if part.has_another(holder, self._run.busy):
                return True
            self._run.minds.add("eager")
            return self._run.rule.eager
        if holder.groups:
            return True
        self._run.minds.add("patient")
        return not self._run.rule.patient

    def in_time(self) -> bool:
        """Whether units that groups wait to read leave while others still run: only if `early`."""
        self._run.minds.add("early")
        return self._run.rule.early and self.give_up_sources()

    def give_up_sources(self) -> bool:
        """When nothing can start: units that groups wait to read leave, those that cost least where room is short.

        Of each model-stage at most half of its units, at least one: what is built instead has to be read somewhere.
        """
        waiting = [*self._run.waiting.short.values(), *(part.shy for part in self._run.parts.values())]
        builds = sorted({b.index: b for builds in waiting for b in builds}.values(), key=self._run.waiting.entry)
        left = {id(part): max(1, part.alive // 2) for part in self._run.parts.values()}
        dropped = False
        for build in builds:
            if not build.goals:
                continue
            holder = self._most_useful(self._run.room.short(build), left)
            if holder is not None:
                left[id(holder.part)] -= 1
                self.drop(holder)
                if dropped:
                    self._run.minds.add("eager")
                dropped = True
                if self._run.rule.eager:
                    self._run.minds.add("eager")
                    break
        return dropped

    def _most_useful(self, short: Mapping[int, int], left: Mapping[int, int]) -> Holder | None:
        """The unit whose Destroy frees most of what is `short` for what has to be received instead, of model-stages
        that have another and some `left`."""
        best: tuple[tuple[float, int], Holder] | None = None
        for holder in dict.fromkeys(h for device in short for h in self.on(device)):
            if holder.part.alive > 1 and left[id(holder.part)] > 0:
                gain = self._gain(holder, short)
                worth = (-self._loss(holder) / gain, gain) if gain else (-inf, 0)
                if gain and (best is None or worth > best[0]):
                    best = (worth, holder)
        return None if best is None else best[1]

    def _gain(self, holder: Holder, short: Mapping[int, int]) -> int:
        """Bytes of what is `short` that are free once the unit is dropped."""
        stored, gain = self._bytes(holder), 0
        if holder.offloaded:
            return 0
        started = [build for build in holder.groups if self._run.started(build)]
        for device in stored.keys() & short.keys():
            freed = stored[device] - sum([build.kept_bytes.get(device, 0) for build in started])
            gain += min(freed, short[device])
        return gain

    def _loss(self, holder: Holder) -> int:
        """Bytes that groups receive more at most, all together, if they cannot read it."""
        waiting = (build for build in holder.groups if not self._run.started(build))
        return sum(holder.part.local.loss(build, holder.unit) for build in waiting)

    def _bytes(self, holder: Holder) -> dict[int, int]:
        """Bytes that the unit stores, by device."""
        return holder.part.local.pricing.stored_on(holder.unit)

    def drop(self, holder: Holder) -> None:
        """No group that has not started reads the unit any more, and it leaves."""
        part = holder.part
        for build in [build for build in holder.groups if not self._run.started(build)]:
            apart = part.local.drop(build, holder.unit)
            holder.groups.remove(build)
            if apart:
                self._replace(part, build, apart)
            elif not build.sources:
                part.open += 1
                part.free(part.holders)
        holder.pending = 0
        self.destroy(holder)

    def _replace(self, part: Part, build: Build, apart: Sequence[Build]) -> None:
        """A group is no more: it has fallen apart."""
        self._run.minds.add("longest_first")
        self._run.waiting.forget(build)
        if id(build) in part.risky:
            part.risky.remove(id(build))
            part.risky.update(id(each) for each in apart if each.sources)
        for unit in build.sources:
            holder = part.old[unit.devices]
            holder.groups.remove(build)
            holder.pending -= 1
        build.goals = ()
        for each in apart:
            for unit in each.sources:
                holder = part.old[unit.devices]
                holder.groups.append(each)
                holder.pending += 1
            if not each.sources:
                part.open += 1
            self._run.bits.append(part.site.joined(each.goals))
            self._run.waiting.enter(each, part)
        part.free(part.holders)

    def releases(self, holder: Holder, drop: bool = False) -> dict[int, int]:
        """Bytes that its Destroy frees by device: storage that goal units have taken over stays."""
        if holder.offloaded:
            return {}
        if not holder.groups:
            return self._bytes(holder)
        found = dict(self._bytes(holder))
        for build in holder.groups:
            if not drop or self._run.started(build):
                for device in build.kept_bytes.keys() & found.keys():
                    found[device] -= build.kept_bytes[device]
        return found

    def destroy(self, holder: Holder) -> None:
        """The unit leaves."""
        step = Step(holder=holder, releases=self.releases(holder))
        if self._run.room.capacity:
            for device in self._run.room.capacity.keys() & holder.unit.devices:
                self._on[device].remove(holder)
        holder.gone = True
        holder.part.alive -= 1
        self._free(step)

    def offload(self, holder: Holder) -> None:
        """The unit goes to host memory and is read there."""
        step = Step(holder=holder, offload=True, releases=self.releases(holder))
        holder.offloaded = True
        self._free(step)

    def _free(self, step: Step) -> None:
        """Enter a Destroy or Offload; what waited for its memory is looked at again."""
        self._run.order.append(step)
        self._run.room.release(step)
        self._run.waiting.release(step.releases.keys())
        if step.holder is not None and step.holder.part.shy:
            self._run.waiting.serve(step.holder.part)
