"""How long devices are occupied at least: each takes part in one group at a time, and sends whole pieces or nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nereus.core import EMU
from nereus.transition.decompose import Build, LocalDAG

MOST_SUMS = 400
"""Beyond so many different times that pieces can add up to, any time is taken to be one."""
ROUNDING = 1e-9
"""Relative; times are sums in any order."""
Pieces = frozenset[float]


@dataclass(frozen=True, slots=True)
class _Sent:
    """What one model-stage has to send to devices that hold nothing of it.

    `pieces` are the times, in bytes, that a group of these can occupy a sender; no sender gives more than that.
    """

    total_bytes: int
    pieces: Pieces
    devices: frozenset[int]


def occupied_bytes(stages: Sequence[Sequence[LocalDAG]]) -> float:
    """The least span in which all devices can receive what they lack and send what is to be sent, one after another.

    The parts of each model-stage share no device.
    """
    taken = _receiving(stages)
    busiest = max(taken.values(), default=0.0)
    sent = [found for parts in stages if (found := _sent(parts)) is not None]
    if not sent:
        return busiest
    copies = {d: local.copies for parts in stages for local in parts for d in _devices(local)}
    choices = [[each] for each in sent] if len(sent) == 1 else [*([each] for each in sent), sent]
    return max(_least(choice, taken, copies, busiest) for choice in choices)


def lasts(build: Build, senders: int) -> float:
    """The least that a group takes, of at most so many senders."""
    return max(float(build.received_bytes), build.moved_bytes / senders if alone(build) else 0.0)


def alone(build: Build) -> bool:
    """Whether it makes one unit. Several may also be made one by one, for less at a time and with less room."""
    return len(build.goals) == 1


def old(local: LocalDAG) -> tuple[EMU, ...]:
    """The units of the start."""
    return (*local.kept, *local.left)


def builds(parts: Iterable[LocalDAG]) -> Iterable[Build]:
    """One of each that is alike."""
    return (build for local in parts for build in local.builds)


def holding(parts: Iterable[LocalDAG]) -> int:
    """Devices that hold a unit at the start, copies included."""
    return sum(local.copies * sum(unit.layout.size for unit in old(local)) for local in parts)


def building(parts: Iterable[LocalDAG], reading: bool = False) -> int:
    """Devices that units are built on, copies included; with `reading`, of those that read their own sources alone."""
    return sum(
        local.copies * sum(len(build.acquires) for build in local.builds if build.sources or not reading)
        for local in parts
    )


def _devices(local: LocalDAG) -> set[int]:
    return {d for unit in old(local) for d in unit.devices}.union(*(build.acquires for build in local.builds))


def _receiving(stages: Sequence[Sequence[LocalDAG]]) -> dict[int, float]:
    """Device → how long it is part of groups that build on it."""
    taken: dict[int, float] = defaultdict(float)
    for parts in stages:
        senders = holding(parts) + building(parts)
        for local in parts:
            for build in local.builds:
                for goal, time in _each(local, build, senders) if build.received_bytes else ():
                    for device in goal.devices:
                        taken[device] += time
    return taken


def _each(local: LocalDAG, build: Build, senders: int) -> Iterator[tuple[EMU, float]]:
    """The goal units of a group, and what each takes at least."""
    if alone(build):
        yield build.goals[0], lasts(build, senders)
        return
    held = {device for source in build.sources for device in source.devices}
    for goal in build.goals:
        yield goal, float(local.pricing.price(goal, held).received_bytes)


def _sent(parts: Sequence[LocalDAG]) -> _Sent | None:
    fresh = [(local.copies, b) for local in parts for b in local.builds if not b.sources and b.moved_bytes]
    if not fresh:
        return None
    sizes = {unit.layout.size for local in parts for unit in old(local)}
    sizes |= {goal.layout.size for build in builds(parts) for goal in build.goals}
    kinds = {(len(build.acquires), build.received_bytes, build.moved_bytes) for _, build in fresh}
    pieces = frozenset(max(float(most), all_ / count) for size, most, all_ in kinds for count in _counts(size, sizes))
    devices = frozenset[int]().union(*map(_devices, parts))
    return _Sent(sum(copies * build.moved_bytes for copies, build in fresh), pieces, devices)


def _counts(size: int, sizes: Iterable[int]) -> list[int]:
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
    sums = {which: _sums(pieces, latest - min(t for t, _ in alike)) for which, pieces in ways.items()}

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
