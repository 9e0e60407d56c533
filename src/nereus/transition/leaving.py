"""Which units leave, when, and what that frees: those that nobody needs, and those whose room is needed more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf

from nereus.transition.decompose import Build
from nereus.transition.holders import Holder, Part
from nereus.transition.progress import Progress
from nereus.transition.room import Step


class Leaving:
    """The Destroys and Offloads of one run."""

    def __init__(self, progress: Progress) -> None:
        self._run = progress
        self._on: dict[int, list[Holder]] = defaultdict(list)
        """Device that may run short → units on it that go."""
        capacity = progress.room.capacity
        for holder in (h for part in progress.parts.values() for h in part.holders.values() if h.goes):
            for device in capacity.keys() & holder.unit.devices if capacity else ():
                self._on[device].append(holder)

    def on(self, device: int) -> list[Holder]:
        """Units that go and are still there, on a device that may run short."""
        return [holder for holder in self._on.get(device, ()) if not holder.gone]

    def in_the_way(self, holder: Holder) -> bool:
        """Whether a device of the unit may run short."""
        return not self._on.keys().isdisjoint(holder.unit.devices)

    def dismiss(self, holders: Iterable[Holder], wanted: Build | None = None) -> None:
        """Destroy those that nobody has to read any more; `wanted` waits for their memory."""
        for holder in list(holders):
            if holder.goes and not holder.gone and not holder.pending:
                part = self._run.of(holder)
                if part.spare and (not part.open or self._sooner(part, holder, wanted)):
                    self.destroy(holder)

    def _sooner(self, part: Part, holder: Holder, wanted: Build | None) -> bool:
        """Whether a unit that new replicas could still be read from leaves for its memory."""
        if wanted is None and self._run.waiting.short.keys().isdisjoint(holder.unit.devices):
            return False
        if wanted is not None and self._run.part(wanted) is part:  # another unit must be read
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
            holder = self._most_useful(self._run.room.short(build), left)
            if holder is not None:
                left[id(self._run.of(holder))] -= 1
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
            part = self._run.of(holder)
            if part.alive > 1 and left[id(part)] > 0:
                releases = self.releases(holder, drop=True)
                gain = sum(min(releases[device], short[device]) for device in releases.keys() & short.keys())
                worth = (-self._loss(holder) / gain, gain) if gain else (-inf, 0)
                if gain and (best is None or worth > best[0]):
                    best = (worth, holder)
        return None if best is None else best[1]

    def _loss(self, holder: Holder) -> int:
        """Bytes that groups receive more at most, all together, if they cannot read it."""
        waiting = (build for build in holder.groups if not self._run.started(build))
        return sum(self._run.part(build).local.loss(build, holder.unit) for build in waiting)

    def drop(self, holder: Holder) -> None:
        """No group that has not started reads the unit any more, and it leaves."""
        part = self._run.of(holder)
        for build in [build for build in holder.groups if not self._run.started(build)]:
            part.local.drop(build, holder.unit)
            holder.groups.remove(build)
            if not build.sources:
                part.open += 1
                for other in part.holders.values():
                    part.free(other)
        holder.pending = 0
        self.destroy(holder)

    def releases(self, holder: Holder, drop: bool = False) -> dict[int, int]:
        """Bytes that its Destroy frees by device: storage that goal units have taken over stays."""
        local, unit = self._run.of(holder).local, holder.unit
        if holder.offloaded:
            return {}
        found = dict(zip(unit.devices, local.pricing.stored(unit.layout), strict=True))
        for build in holder.groups:
            if not drop or self._run.started(build):
                for device in build.kept_bytes.keys() & found.keys():
                    found[device] -= build.kept_bytes[device]
        return found

    def destroy(self, holder: Holder) -> None:
        """The unit leaves."""
        part = self._run.of(holder)
        step = Step(holder=holder, releases=self.releases(holder))
        holder.gone = True
        part.alive -= 1
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
        part = self._run.of(step.holder) if step.holder is not None else None
        if part is not None and part.shy:
            self._run.waiting.serve(part)
