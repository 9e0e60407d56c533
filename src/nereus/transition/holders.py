"""Whole units of one model-stage during a transition, and which of them is free to be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from nereus.core import EMU
from nereus.transition.decompose import Build, LocalDAG
from nereus.transition.site import Site, Spot


@dataclass(slots=True, eq=False)
class Holder:
    """A whole unit of `part`. `maker` built it in this transition; `groups` read it, `pending` have not committed."""

    unit: EMU
    part: Part
    goes: bool = False
    maker: Build | None = None
    groups: list[Build] = field(default_factory=list)
    pending: int = 0
    gone: bool = False
    offloaded: bool = False
    crowded: bool = False
    """Whether it is read after others, since a device of it may run short."""
    queued: bool = False
    """Whether it is among those believed to be free."""
    _spot: Spot | None = None

    @property
    def spot(self) -> Spot:
        """Where it is; most of those that go are never asked."""
        if self._spot is None:
            self._spot = self.part.site.spot(self.unit.devices)
        return self._spot


def duration(build: Build, sources: tuple[Holder, ...], site: Site) -> float:
    """Bytes that the busiest device sends or receives, `site.far` times as many where nodes are crossed."""
    sending = sum([len(holder.unit.devices) for holder in sources])
    busiest = max(build.received_bytes, build.moved_bytes / sending)
    if site.far <= 1 or not busiest:
        return busiest
    nodes = 0
    for goal in build.goals:
        nodes |= site.spot(goal.devices).nodes
    for holder in sources:
        nodes |= holder.spot.nodes
    return busiest * site.far if nodes & (nodes - 1) else busiest


Idle = dict[int, deque[Holder]]
"""Node → units on it that are believed to be free."""


class Part:
    """How far one model-stage has come."""

    def __init__(self, local: LocalDAG, site: Site, fresh: bool = False, tight: Set[int] = frozenset()) -> None:
        self.local, self.site = local, site
        self.going = [Holder(unit, self, True) for unit in local.left]
        """Units of the start that leave."""
        self.holders = [Holder(unit, self) for unit in local.kept]
        """All units, gone or not: those of the start, then those built."""
        self.holders += self.going
        self.old = {holder.unit.devices: holder for holder in self.holders}
        """Devices → the unit of the start on them."""
        self.risky: set[int] = set()
        """Groups that may lose what they read since a device of theirs is `tight`, and have not started."""
        if tight:
            for holder in self.going:
                holder.crowded = not tight.isdisjoint(holder.unit.devices)
            self.risky = {id(build) for build in local.builds if build.sources and not tight.isdisjoint(build.acquires)}
        self.open = 0
        """Groups without fixed sources that have not started."""
        for build in local.builds:
            self.open += not build.sources
            for unit in build.sources:
                holder = self.old[unit.devices]
                holder.groups.append(build)
                holder.pending += 1
        self.alive = len(self.holders)
        """Whole units, of which new replicas can be read."""
        self.settled = False
        """Whether a group has committed."""
        self.queue: list[tuple[int, int, Build]] = []
        """Groups without fixed sources that could start, a heap."""
        self.shy: list[Build] = []
        """Groups without fixed sources that have no room before units of the same model-stage leave."""
        self._coming: dict[int, float] = {}
        """Node → when a unit on it becomes free next."""
        self._old: Idle = {}
        self._new: Idle = {}
        self._crowded: Idle = {}
        """Units of the start that are not crowded, units built in this transition, and crowded ones."""
        self._idle = (self._new, self._old, self._crowded) if fresh else (self._old, self._new, self._crowded)
        if self.open:
            self.free(self.holders)

    @property
    def spare(self) -> bool:
        """Whether a unit may leave: another one is there, where one has to be read one that can be."""
        return self.alive > 1 or (self.local.elsewhere and not self.open)

    def free(self, holders: Iterable[Holder]) -> None:
        """They may be read again."""
        for holder in holders if self.open else ():
            if not holder.queued:
                holder.queued = True
                idle = self._crowded if holder.crowded else self._old if holder.maker is None else self._new
                idle.setdefault(holder.spot.node, deque()).append(holder)

    def take(self, build: Build, busy: int, resting: list[tuple[int, Holder]]) -> tuple[Holder, ...]:
        """What `build` reads: a unit on its node before others, one of the start before a new one unless `fresh`.

        More than one when a unit has fewer devices than are to be built. Units that turn out to be `busy` go to
        `resting`, each with a device that keeps it so. What has to leave for the group is not read by it.
        """
        node = self.site.spot(build.goals[0].devices).node
        found: list[Holder] = []
        apart: list[Holder] = []
        wanted = len(build.acquires)
        while wanted > 0 and (holder := self._next(node)) is not None:
            devices = holder.unit.devices
            if holder.goes and not holder.offloaded and not build.acquires.keys().isdisjoint(devices):
                apart.append(holder)
            elif busy & holder.spot.devices:
                resting.append((self.site.first(devices, busy), holder))
            else:
                found.append(holder)
                busy |= holder.spot.devices
                wanted -= len(devices)
        self.free(apart)
        return tuple(found)

    def _next(self, node: int) -> Holder | None:
        """The next unit that is believed to be free, no longer counted among those."""
        first, second, third = self._idle
        while first or second or third:
            near = first if node in first else second if node in second else third if node in third else None
            idle = near or first or second or third
            at = node if node in idle else next(iter(idle))
            holder = idle[at].popleft()
            if not idle[at]:
                del idle[at]
            holder.queued = False
            if not holder.gone:
                return holder
        return None

    def has_another(self, holder: Holder, busy: int) -> bool:
        """Whether another unit than `holder` can be read now."""
        return any(
            other is not holder and not other.gone and not busy & other.spot.devices
            for idle in self._idle
            for holders in idle.values()
            for other in holders
        )

    @property
    def mixed(self) -> bool:
        """Whether there are units of the start and new ones to choose from."""
        return bool(self._old and self._new)

    def old_units(self) -> int:
        """Units of the start that are believed to be free. Those built since may lie on their devices."""
        return sum(len(holders) for idle in (self._old, self._crowded) for holders in idle.values())

    def announce(self, build: Build, sources: tuple[Holder, ...], now: float, end: float) -> None:
        """What `build` reads and makes becomes free at `end`."""
        spots = [self.site.spot(goal.devices) for goal in build.goals]
        spots.extend([holder.spot for holder in sources])
        for spot in spots:
            known = self._coming.get(spot.node, now)
            self._coming[spot.node] = end if known <= now or end < known else known

    def worth_waiting(self, build: Build, now: float) -> bool:
        """Whether a unit on the node of `build` that is in use now ends it sooner than one from elsewhere."""
        node = self.site.spot(build.goals[0].devices).node
        if any(node in idle for idle in self._idle):
            return False
        end = self._coming.get(node, 0.0)
        return now < end and end + build.received_bytes < now + self.site.far * build.received_bytes
