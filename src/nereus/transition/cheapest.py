"""The order that gives up least where memory is short: which old units leave before all is read that could be.

Depth first over what is alive and built, cheapest next step first, never again through what was reached as cheaply. An
old unit leaves early only for the next group, which has no room beside it or is tied to others by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from nereus.core import EMU
from nereus.transition.alone import Alone
from nereus.transition.crowd import Crowd, Levels, Place, each
from nereus.transition.lead import GroupName, Lead

UNITS_A_TRY = 8
"""A group of so many goal units counts as one more try: to look at it takes that much longer."""


@dataclass(frozen=True, slots=True)
class Cheapest:
    """An order. `lost_bytes` are received beyond what arrives when every old unit is read on its own devices.

    `least`: no order loses less of those in which an old unit leaves early only for a group that has no room beside it,
    or to untie a group. Where a tied group fits whole, that others lose as much has not been shown.
    """

    lead: Lead
    lost_bytes: int
    least: bool


@dataclass(frozen=True, slots=True, order=True)
class _Next:
    """A group that could be built once the old units `gone` have left."""

    lost_bytes: int
    raised_bytes: int
    """Net, what it acquires less what it reads."""
    group: int
    gone: int


def cheapest(crowd: Crowd, tries: int, limit_bytes: float = inf) -> Cheapest | None:
    """The best order in so many tries that loses less than a limit, or None."""
    search = _Search(crowd, tries, limit_bytes)
    search.go((1 << len(crowd.old)) - 1, 0, 0)
    if search.steps is None:
        return None
    return Cheapest(Lead((), search.steps), round(search.limit), search.tries > 0)


class _Search:
    def __init__(self, crowd: Crowd, tries: int, limit: float) -> None:
        self.crowd, self.tries, self.limit = crowd, tries, limit
        self.steps: tuple[EMU | GroupName, ...] | None = None
        self._alone = Alone(crowd)
        self._all = (1 << len(crowd.new)) - 1
        self._level = dict(crowd.level)
        self._so_far: list[EMU | GroupName] = []
        self._known: dict[tuple[int, int], int] = {}

    def go(self, alive: int, built: int, lost: int) -> None:
        """Every order from here that could lose less than the best."""
        if self._known.get((alive, built), self.limit) <= lost:
            return
        if built == self._all:
            self.limit, self.steps = lost, tuple(self._so_far)
            return
        self._known[alive, built] = lost
        nexts = [(self._after(step, alive, built), step) for step in self._nexts(alive, built, lost)]
        for most, step in sorted(nexts):
            if self.tries <= 0:
                return
            if lost + most >= self.limit:
                return
            mark, before = len(self._so_far), dict(self._level)
            now = self._leave(step.gone, alive, built)
            _add(self._level, self.crowd.wanted(step.group, now))
            self._so_far.append(self._name(step.group))
            then = built | step.group
            now = self._leave(self._idle(now, then), now, then)
            self.go(now, then, lost + step.lost_bytes)
            del self._so_far[mark:]
            self._level = before

    def _name(self, group: int) -> GroupName:
        goals = [place.unit for place in each(self.crowd.new, group)]
        return goals[0].model_stage, frozenset(device for unit in goals for device in unit.devices)

    def _after(self, step: _Next, alive: int, built: int) -> float:
        """The least that is lost from here on if this is next."""
        return step.lost_bytes + self._alone.lost(alive & ~step.gone, built | step.group)

    def _nexts(self, alive: int, built: int, lost: int) -> Iterator[_Next]:
        todo = self._all & ~built
        seen: set[tuple[int, int]] = set()
        for new in each(self.crowd.new, todo):
            for step in self._ways(new, alive, built, lost):
                if (step.group, step.gone) not in seen:
                    seen.add((step.group, step.gone))
                    yield step

    def _ways(self, new: Place, alive: int, built: int, lost: int) -> Iterator[_Next]:
        """Old units whose leaving lets a goal unit be built, none of them in vain; the cheapest before others."""
        heap, seen = [(0, 0)], {0}
        while heap:
            cost, gone = heappop(heap)
            if lost + cost >= self.limit:
                return
            now = alive & ~gone
            group = self.crowd.together(new.bit, now, built)
            self.tries -= 1 + group.bit_count() // UNITS_A_TRY
            if self.tries <= 0:
                return
            wanted = self.crowd.wanted(group, now)
            short = self._short(wanted, gone, built)
            if short is None:
                met = 0
                for place in each(self.crowd.new, group):
                    met |= place.meets
                read = sum(sum(old.stored.values()) for old in each(self.crowd.old, met & now))
                yield _Next(cost, sum(wanted.values()) - read, group, gone)
                continue
            helps = self.crowd.on[short] & now
            if group != new.bit:
                for place in each(self.crowd.new, group):
                    helps |= place.meets & now & self.crowd.split
            for old in each(self.crowd.old, helps):
                more = gone | old.bit
                if more not in seen and self.crowd.may_leave(old, now, built):
                    seen.add(more)
                    heappush(heap, (cost + self.crowd.lost(old, built), more))

    def _short(self, wanted: Levels, gone: int, built: int) -> int | None:
        """A device without room."""
        tight, level = self.crowd.tight, self._level
        over = {d: o for d, size in wanted.items() if size and (o := level[d] + size - tight[d]) > 0}
        for old in each(self.crowd.old, gone) if over else ():
            for device, size in self.crowd.freed(old, built).items():
                if device in over:
                    over[device] -= size
        return next((device for device, size in over.items() if size > 0), None)

    def _idle(self, alive: int, built: int) -> int:
        """Old units that nobody has to read any more."""
        found = 0
        for old in each(self.crowd.old, alive):
            if not old.meets & ~built and (old.safe or built & old.others):
                found |= old.bit
        return found

    def _leave(self, gone: int, alive: int, built: int) -> int:
        for old in each(self.crowd.old, gone):
            _add(self._level, {device: -size for device, size in self.crowd.freed(old, built).items()})
            self._so_far.append(old.unit)
        return alive & ~gone


def _add(levels: Levels, more: Mapping[int, int]) -> None:
    for device, size in more.items():
        levels[device] += size
