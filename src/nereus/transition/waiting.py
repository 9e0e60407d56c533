"""Groups that could start next, and what those that cannot wait for: a device, memory on one, a unit to read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from heapq import heapify, heappush

from nereus.core import ModelStage
from nereus.transition.decompose import Build
from nereus.transition.holders import Holder, Part
from nereus.transition.site import Site


class Waiting:
    """Queues of one run. Groups start in stage order, or the `longest_first`."""

    def __init__(self, parts: Mapping[ModelStage, Part], site: Site, longest_first: bool) -> None:
        self._parts, self._site, self._longest_first = parts, site, longest_first
        self.ready: list[tuple[int, int, Build]] = []
        """Groups that may start as far as is known and know what they read, a heap."""
        self.hungry: dict[int, Part] = {}
        """Model-stages whose groups may find units to read, by id."""
        self._resting: dict[int, list[Build | Holder]] = defaultdict(list)
        """Device → what waits until it is free."""
        self._rested = 0
        """Those devices, a bit each."""
        self.short: dict[int, list[Build]] = {}
        """Device → groups that wait for memory on it."""
        self._builds: list[Build] = []
        """All groups by index, kept: others tell them by `id`."""
        self._part_of: list[Part] = []
        for part in parts.values():
            for build in part.local.builds:
                build.index = len(self._builds)
                self._builds.append(build)
                self._part_of.append(part)
                (self.ready if build.sources else part.queue).append(self.entry(build))
            if part.queue:
                heapify(part.queue)
                self.serve(part)
        heapify(self.ready)

    def enter(self, build: Build, part: Part) -> None:
        """A group of the model-stage is new; it could start."""
        build.index = len(self._builds)
        self._builds.append(build)
        self._part_of.append(part)
        self.queue(build)

    def forget(self, build: Build) -> None:
        """It waits for memory no longer."""
        for device, builds in self.short.items():
            if build in builds:
                builds.remove(build)
                if not builds:
                    del self.short[device]
                return

    def part(self, build: Build) -> Part:
        """The model-stage that a group builds."""
        return self._part_of[build.index]

    def entry(self, build: Build) -> tuple[int, int, Build]:
        """Its place in a queue."""
        return (-build.received_bytes if self._longest_first else 0, build.index, build)

    def queue(self, build: Build) -> None:
        """It could start, unless it has fallen apart."""
        if not build.goals:
            return
        if build.sources:
            heappush(self.ready, self.entry(build))
        else:
            part = self._part_of[build.index]
            heappush(part.queue, self.entry(build))
            self.serve(part)

    def serve(self, part: Part) -> None:
        """Groups of the model-stage may find units to read."""
        self.hungry[id(part)] = part

    def fed(self) -> list[Part]:
        """The hungry, in the order of their model-stages, hungry no longer."""
        found, self.hungry = self.hungry, {}
        if len(found) == 1:
            return list(found.values())
        return [part for part in self._parts.values() if id(part) in found]

    def rest(self, what: Build | Holder, device: int) -> None:
        """Leave it until the device is free."""
        self._resting[device].append(what)
        self._rested |= self._site.bits[device]

    def lack(self, build: Build, device: int) -> None:
        """Leave it until the device has more memory."""
        self.short.setdefault(device, []).append(build)

    def queued(self) -> list[Build]:
        """All groups that could start, model-stage by model-stage; those that know what they read before."""
        return [entry[2] for queue in self._queues() for entry in queue]

    def clear(self) -> None:
        """Forget those that could start."""
        for queue in self._queues():
            queue.clear()

    def first(self) -> Build | None:
        """One that waits, for memory before others."""
        waiting = [build for builds in self.short.values() for build in builds]
        for part in self._parts.values():
            waiting.extend((*part.shy, *(entry[2] for entry in part.queue)))
        return waiting[0] if waiting else None

    def _queues(self) -> list[list[tuple[int, int, Build]]]:
        return [self.ready, *(part.queue for part in self._parts.values())]

    def free(self, bits: int, build: Build) -> None:
        """The devices of `bits`, of a group and what it has read, are free: what has waited may be read, or start."""
        if not self._rested & bits:
            return
        self._rested &= ~bits
        devices = set(build.acquires).union(*(unit.devices for unit in build.sources))
        for device in self._resting.keys() & devices:
            for waiting in self._resting.pop(device):
                if isinstance(waiting, Build):
                    self.queue(waiting)
                else:
                    waiting.part.free((waiting,))
                    self.serve(waiting.part)

    def release(self, devices: Iterable[int]) -> None:
        """Devices have more memory: groups that have waited for it may start."""
        for device in self.short.keys() & devices if self.short else ():
            for build in self.short.pop(device):
                self.queue(build)
