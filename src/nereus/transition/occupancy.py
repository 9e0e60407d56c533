"""How long devices are occupied at least: each takes part in one group at a time, and sends whole pieces or nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nereus.transition.decompose import LocalDAG
from nereus.transition.demand import Stage

MOST_SUMS = 400
"""Beyond so many different times that pieces can add up to, any time is taken to be one."""
ROUNDING = 1e-9
"""Relative; times are sums in any order."""
Pieces = frozenset[float]


@dataclass(frozen=True, slots=True)
class _Sent:
    """What one model-stage has to send to devices that hold nothing of it.

    `pieces` are the times, in bytes, that a group of these can occupy a sender; no sender gives more than that. Of the
    `loose` only the least is known.
    """

    total_bytes: int
    pieces: Pieces
    devices: frozenset[int]
    loose: bool


def occupied_bytes(stages: Sequence[Stage]) -> float:
    """The least span in which all devices can receive what they lack and send what is to be sent, one after another."""
    taken = _receiving(stages)
    busiest = max(taken.values(), default=0.0)
    sent = [found for stage in stages if (found := _sent(stage)) is not None]
    if not sent:
        return busiest
    copies = {d: local.copies for stage in stages for local in stage.parts for d in _devices(local)}
    choices = [[each] for each in sent] if len(sent) == 1 else [*([each] for each in sent), sent]
    return max(_least(choice, taken, copies, busiest) for choice in choices)


def _devices(local: LocalDAG) -> set[int]:
    units = (*local.kept, *local.left)
    return {d for unit in units for d in unit.devices}.union(*(build.acquires for build in local.builds))


def _receiving(stages: Sequence[Stage]) -> dict[int, float]:
    """Device → how long it is part of groups that build on it."""
    taken: dict[int, float] = defaultdict(float)
    for stage in stages:
        senders = stage.holding + stage.building()
        for demand in stage.demands:
            time = demand.lasts(senders) if demand.received_bytes else 0.0
            for device in demand.goal.devices if time else ():
                taken[device] += time
    return taken


def _sent(stage: Stage) -> _Sent | None:
    fresh = [demand for demand in stage.demands if demand.fresh and demand.moved_bytes]
    if not fresh:
        return None
    sizes = frozenset(unit.layout.size for unit in (*stage.old, *(demand.goal for demand in stage.demands)))
    groups: dict[int, Counter[tuple[int, int, int]]] = defaultdict(Counter)
    for demand in fresh:
        groups[id(demand.build)][demand.goal.layout.size, demand.received_bytes, demand.moved_bytes] += 1
    most_of: Counter[tuple[int, int, int]] = Counter()
    for group in groups.values():
        most_of |= group
    # Several of those that are tied may be built as one group, from fewer senders than they are devices.
    kinds = {
        (size * number, most, all_ * number)
        for (size, most, all_), count in most_of.items()
        for number in range(1, count + 1)
    }
    pieces = frozenset(max(float(most), all_ / count) for size, most, all_ in kinds for count in _counts(size, sizes))
    devices = frozenset[int]().union(*map(_devices, stage.parts))
    return _Sent(
        sum(demand.copies * demand.moved_bytes for demand in fresh),
        pieces,
        devices,
        any(len(group) > 1 for group in groups.values()),
    )


@lru_cache(maxsize=1024)
def _counts(size: int, sizes: frozenset[int]) -> list[int]:
    """How many senders a unit on `size` devices may have: units of `sizes`, up to as many as there are receivers."""
    reached = {0}
    for count in range(1, size):
        if any(count - each in reached for each in sizes):
            reached.add(count)
    return [*sorted(reached - {0}), size]


def _least(sent: Sequence[_Sent], taken: Mapping[int, float], copies: Mapping[int, int], busiest: float) -> float:
    """The first moment up to which devices have had the time to send all that is `sent`."""
    held: dict[int, int] = defaultdict(int)
    for index, each in enumerate(sent):
        for device in each.devices:
            held[device] |= 1 << index
    alike: Counter[tuple[float, int]] = Counter()
    for device, which in held.items():
        alike[taken.get(device, 0.0), which] += copies[device]
    wanted = sum(each.total_bytes for each in sent)
    # By then every device has had time for pieces of its share, but for less than one piece.
    latest = busiest + wanted / sum(alike.values()) + max(max(each.pieces) for each in sent)
    ways = {which: _pieces(sent, which) for _, which in alike}
    loose = sum(1 << index for index, each in enumerate(sent) if each.loose)
    longest = latest - min(t for t, _ in alike)
    sums = {which: None if which & loose else _sums(pieces, longest) for which, pieces in ways.items()}

    def enough(end: float) -> bool:
        had = sum(n * _most(sums[which], ways[which], end * (1 + ROUNDING) - t) for (t, which), n in alike.items())
        return had >= wanted * (1 - ROUNDING)

    moments = {t + each for t, which in alike for each in sums[which] or ()}
    if any(sums[which] is None for which in ways):
        moments.update(busiest + step * (latest - busiest) / MOST_SUMS for step in range(MOST_SUMS + 1))
    ends = [busiest, *sorted(moment for moment in moments if busiest < moment < latest), latest]
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(ends[middle]) else (middle + 1, high)
    whole = all(sums[which] is not None for which in ways)
    return ends[low] if whole or low == 0 else ends[low - 1]


def _pieces(sent: Sequence[_Sent], which: int) -> Pieces:
    return frozenset[float]().union(*(each.pieces for index, each in enumerate(sent) if which >> index & 1))


def _most(sums: Sequence[float] | None, pieces: Pieces, time: float) -> float:
    """The most of `time` that pieces can fill."""
    if sums is None:
        return time if time >= min(pieces) else 0.0
    return sums[bisect_right(sums, time) - 1] if time >= 0 else 0.0


@lru_cache(maxsize=256)
def _sums(pieces: Pieces, most: float) -> tuple[float, ...] | None:
    """What some of `pieces`, each any number of times, add up to, ascending; None: too many."""
    found, grown = {0.0}, [0.0]
    while grown:
        grown = sorted({one + piece for one in grown for piece in pieces if one + piece <= most} - found)
        found.update(grown)
        if len(found) > MOST_SUMS:
            return None
    return tuple(sorted(found))
