"""Whole units of one model-stage during a transition, and which of them is free to be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

from nereus.core import EMU
from nereus.transition.decompose import Build, LocalDAG
from nereus.transition.site import Site


@dataclass(slots=True, eq=False)
class Holder:
    """A whole unit. `maker` built it in this transition; `groups` read it, `pending` of them have not committed."""

    unit: EMU
    goes: bool = False
    maker: Build | None = None
    groups: list[Build] = field(default_factory=list)
    pending: int = 0
    gone: bool = False
    offloaded: bool = False
    queued: bool = False
    """Whether it is among those believed to be free."""


def duration(build: Build, sources: tuple[Holder, ...], site: Site) -> float:
    """Bytes that the busiest device sends or receives, `site.far` times as many where nodes are crossed."""
    sending = sum(len(holder.unit.devices) for holder in sources)
    busiest = max(build.received_bytes, build.moved_bytes / sending)
    if site.far > 1 and busiest:
        units = (*build.goals, *(holder.unit for holder in sources))
        return busiest * site.far if site.cross(units) else busiest
    return busiest


class Part:
    """How far one model-stage has come."""

    def __init__(self, local: LocalDAG, site: Site, fresh: bool = False) -> None:
        self.local = local
        self._fresh = fresh
        self.holders = {unit: Holder(unit) for unit in local.kept}
        self.holders |= {unit: Holder(unit, goes=True) for unit in local.left}
        self.open = 0
        """Groups without fixed sources that have not started."""
        for build in local.builds:
            self.open += not build.sources
            for unit in build.sources:
                self.holders[unit].groups.append(build)
                self.holders[unit].pending += 1
        self.alive = len(self.holders)
        """Whole units, of which new replicas can be read."""
        self.settled = False
        """Whether a group has committed."""
        self.queue: list[tuple[int, int, Build]] = []
        """Groups without fixed sources that could start, a heap."""
        self.shy: list[Build] = []
        """Groups without fixed sources that have no room before units of the same model-stage leave."""
        self._site = site
        self._coming: dict[int, float] = {}
        """Node → when a unit on it becomes free next."""
        self._idle: tuple[dict[int, deque[Holder]], dict[int, deque[Holder]]] = ({}, {})
        """Units of the start, and units built in this transition: node → those believed to be free."""
        for holder in self.holders.values():
            self.free(holder)

    @property
    def spare(self) -> bool:
        """Whether a unit may leave: another one is there, where one has to be read one that can be."""
        return self.alive > 1 or (self.local.elsewhere and not self.open)

    def free(self, holder: Holder) -> None:
        """`holder` may be read again."""
        if holder.queued or not self.open:
            return
        holder.queued = True
        idle = self._idle[holder.maker is not None]
        idle.setdefault(self._site.node(holder.unit), deque()).append(holder)

    def take(self, build: Build, busy: Set[int], resting: list[tuple[int, Holder]]) -> tuple[Holder, ...]:
        """What `build` reads: a unit on its node before others, one of the start before a new one unless `fresh`.

        More than one when a unit has fewer devices than are to be built. Units that turn out to be busy go to
        `resting`, each with a device that keeps it so. What has to leave for the group is not read by it.
        """
        node = self._site.node(build.goals[0])
        found: list[Holder] = []
        apart: list[Holder] = []
        chosen: set[int] = set()
        wanted = len(build.acquires)
        while wanted > 0 and (holder := self._next(node)) is not None:
            devices = holder.unit.devices
            if holder.goes and not holder.offloaded and not build.acquires.keys().isdisjoint(devices):
                apart.append(holder)
            elif busy.isdisjoint(devices) and chosen.isdisjoint(devices):
                found.append(holder)
                chosen.update(devices)
                wanted -= len(devices)
            else:
                resting.append((next(device for device in devices if device in busy or device in chosen), holder))
        for holder in apart:
            self.free(holder)
        return tuple(found)

    def _next(self, node: int) -> Holder | None:
        """The next unit that is believed to be free, no longer counted among those."""
        first, second = reversed(self._idle) if self._fresh else self._idle
        while first or second:
            idle = first if node in first else second if node in second else first or second
            at = node if node in idle else next(iter(idle))
            holder = idle[at].popleft()
            if not idle[at]:
                del idle[at]
            holder.queued = False
            if not holder.gone:
                return holder
        return None

    def has_another(self, holder: Holder, busy: Set[int]) -> bool:
        """Whether another unit than `holder` can be read now."""
        return any(
            other is not holder and not other.gone and busy.isdisjoint(other.unit.devices)
            for idle in self._idle
            for holders in idle.values()
            for other in holders
        )

    @property
    def mixed(self) -> bool:
        """Whether there are units of the start and new ones to choose from."""
        return all(self._idle)

    def old_units(self) -> int:
        """Units of the start that are believed to be free. Those built since may lie on their devices."""
        return sum(len(holders) for holders in self._idle[0].values())

    def announce(self, build: Build, sources: tuple[Holder, ...], now: float, end: float) -> None:
        """What `build` reads and makes becomes free at `end`."""
        if self._site.far > 1:
            for unit in (*build.goals, *(holder.unit for holder in sources)):
                node = self._site.node(unit)
                known = self._coming.get(node, now)
                self._coming[node] = min(known, end) if known > now else end

    def worth_waiting(self, build: Build, now: float) -> bool:
        """Whether a unit on the node of `build` that is in use now ends it sooner than one from elsewhere."""
        node, (old, new) = self._site.node(build.goals[0]), self._idle
        if node in old or node in new:
            return False
        end = self._coming.get(node, 0.0)
        return now < end and end + build.received_bytes < now + self._site.far * build.received_bytes
