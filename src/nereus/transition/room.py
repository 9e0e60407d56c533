"""Memory of the devices that could run short during a transition, and which releases an acquisition has to wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field

from nereus.transition.decompose import Build
from nereus.transition.holders import Holder


@dataclass(slots=True, eq=False)
class Step:
    """One entry of an order: the commit group `build`, or else the Destroy (`offload`: the Offload) of `holder`.

    `sources` are what a group reads, `after` the steps that free the memory it needs, with the devices concerned. A
    Destroy waits for the groups that have read its unit; they are copies, so the last one is never lost.
    """

    build: Build | None = None
    holder: Holder | None = None
    offload: bool = False
    sources: tuple[Holder, ...] = ()
    releases: dict[int, int] = field(default_factory=dict)
    after: dict[int, tuple[Step, list[int]]] = field(default_factory=dict)
    """id of a step → it, and the devices."""

    def wait_for(self, step: Step, device: int) -> None:
        """Add a step to wait for, on account of a device."""
        self.after.setdefault(id(step), (step, []))[1].append(device)


class Room:
    """Levels of the devices whose capacity all acquisitions together could pass; the others are not looked at."""

    def __init__(
        self, used: Mapping[int, int], capacity: Mapping[int, int], builds: Iterable[Build], buffer_bytes: int = 0
    ) -> None:
        most = _most(used, builds) if capacity else {}
        self.capacity = {
            device: capacity[device] - buffer_bytes
            for device, level in most.items()
            if device in capacity and level + buffer_bytes > capacity[device]
        }
        self._start = {device: used.get(device, 0) for device in self.capacity}
        self._wanted: dict[int, tuple[dict[int, int], list[tuple[int, int, int]]]] = {}
        """Index of a group → what it acquires, and that as (device, bytes, capacity) of the devices looked at."""
        self._empty()

    def _empty(self) -> None:
        self._level = dict(self._start)
        self._acquired: dict[int, int] = defaultdict(int)
        self._releasers: dict[int, list[Step]] = defaultdict(list)

    def afresh(self) -> Room:
        """The same before anything has been acquired, for another order of the same groups."""
        made = copy(self)
        made._empty()
        return made

    def wanted(self, build: Build) -> list[tuple[int, int, int]]:
        """(device, bytes acquired, capacity) of the devices of a group that could run short."""
        known = self._wanted.get(build.index)
        if known is None or known[0] is not build.acquires:
            capacity = self.capacity
            found = [(d, size, capacity[d]) for d, size in build.acquires.items() if size and d in capacity]
            known = self._wanted[build.index] = (build.acquires, found)
        return known[1]

    def short(self, build: Build) -> dict[int, int]:
        """Device → bytes missing for a group now."""
        level = self._level
        if not level:
            return {}
        wanted = self.wanted(build)
        return {d: over for d, size, limit in wanted if (over := level[d] + size - limit) > 0} if wanted else {}

    def levels(self) -> dict[int, int]:
        """Bytes in use now on each device that could run short."""
        return dict(self._level)

    def acquire(self, step: Step, steps: Mapping[int, Step]) -> None:
        """Take what a group allocates. It waits for releases until what surely came before leaves room for it."""
        build = step.build
        if not self.capacity or build is None:
            return
        before: set[int] | None = None
        for device, wanted, limit in self.wanted(build):
            level = self._start[device] + self._acquired[device] + wanted
            self._acquired[device] += wanted
            self._level[device] += wanted
            if level > limit:
                before = ancestors(step, steps) if before is None else before
                level -= sum(r.releases[device] for r in self._releasers[device] if id(r) in before)
                for releaser in self._releasers[device]:
                    if level > limit and id(releaser) not in before:
                        level -= releaser.releases[device]
                        step.wait_for(releaser, device)

    def release(self, step: Step) -> None:
        """Give back what a Destroy or an Offload frees."""
        level = self._level
        for device, freed in step.releases.items() if level else ():
            if device in level:
                level[device] -= freed
                self._releasers[device].append(step)


def _most(used: Mapping[int, int], builds: Iterable[Build]) -> dict[int, int]:
    """Device → its level if nothing is ever released."""
    found = dict(used)
    for build in builds:
        # A group that gives up what it reads in place acquires what it would have taken over as well.
        for taken in (build.acquires, build.kept_bytes):
            for device, size in taken.items():
                found[device] = found.get(device, 0) + size
    return found


def ancestors(step: Step, steps: Mapping[int, Step]) -> set[int]:
    """Ids of the steps that surely end before `step` starts; `steps` has the step of each build by its id."""
    found: set[int] = set()
    todo = [step]
    while todo:
        now = todo.pop()
        makers = [holder.maker for holder in now.sources if holder.maker is not None]
        reading = now.holder.groups if now.holder is not None and not now.offload else []
        earlier = [other for other, _ in now.after.values()]
        earlier.extend(steps[id(build)] for build in (*makers, *reading))
        for other in earlier:
            if id(other) not in found:
                found.add(id(other))
                todo.append(other)
    return found
