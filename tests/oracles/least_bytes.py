"""The least that must move and what the paper's composition moves, by areas of rectangles and a search for paths.

Written apart from the implementation: a copy of an evenly cut model is the unit square, layers by columns of weights;
a rank owns a rectangle of it. All numbers are exact multiples of one copy (S).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd

Degrees = tuple[int, int]
"""(tp, pp) of a unit."""
Units = Sequence[Sequence[int]]
"""The devices of every unit, by pp rank, then tp rank."""


def overlap(one: Degrees, rank: int, other: Degrees, its: int) -> Fraction:
    """The part of a copy that both ranks own."""
    area = Fraction(1)
    for axis in (0, 1):
        mine, theirs = ((r % t, t) if axis == 0 else (r // t, p) for (t, p), r in ((one, rank), (other, its)))
        low = max(Fraction(mine[0], mine[1]), Fraction(theirs[0], theirs[1]))
        high = min(Fraction(mine[0] + 1, mine[1]), Fraction(theirs[0] + 1, theirs[1]))
        area *= max(high - low, Fraction(0))
    return area


def gains(before: Degrees, start: Units, after: Degrees, goal: Units) -> list[list[Fraction]]:
    """Per goal device and goal position: what the device holds of the position already."""
    rank_of = {device: rank for unit in start for rank, device in enumerate(unit)}
    size = after[0] * after[1]
    return [
        [
            overlap(before, rank_of[device], after, place % size) if device in rank_of else Fraction(0)
            for place in range(size * len(goal))
        ]
        for unit in goal
        for device in unit
    ]


def in_named_order(before: Degrees, start: Units, after: Degrees, goal: Units) -> Fraction:
    """What arrives when every device takes the position that the goal names for it."""
    kept = gains(before, start, after, goal)
    return len(goal) - sum((row[index] for index, row in enumerate(kept)), Fraction(0))


def least(before: Degrees, start: Units, after: Degrees, goal: Units) -> Fraction:
    """M*: what arrives under the best deal of positions, found by cancelling improving cycles until there is none."""
    unit = before[0] * before[1] * after[0] * after[1]
    kept = [[int(gain * unit) for gain in row] for row in gains(before, start, after, goal)]
    chosen = list(range(len(kept)))
    while cycle := _improving(kept, chosen):
        places = [chosen[device] for device in cycle]
        for device, place in zip(cycle, places[1:] + places[:1], strict=True):
            chosen[device] = place
    return len(goal) - Fraction(sum(kept[device][place] for device, place in enumerate(chosen)), unit)


def _improving(kept: list[list[int]], chosen: list[int]) -> list[int]:
    """Devices that gain together when each takes the next one's position: a cycle of positive weight (Bellman-Ford)."""
    count = len(chosen)
    reach, came = [0] * count, [-1] * count
    changed = -1
    for _ in range(count):
        changed = -1
        for device in range(count):
            for other in range(count):
                gain = kept[device][chosen[other]] - kept[device][chosen[device]]
                if other != device and reach[device] + gain > reach[other]:
                    reach[other], came[other], changed = reach[device] + gain, device, other
        if changed < 0:
            return []
    for _ in range(count):
        changed = came[changed]
    cycle = [changed]
    while came[cycle[-1]] != changed:
        cycle.append(came[cycle[-1]])
    return cycle[::-1]


def composed(before: Degrees, start: Units, after: Degrees, goal: Units) -> Fraction:
    """C: all old ranks gather units of the common layout, then every common unit's worth of new devices is sent one."""
    common = gcd(before[0], after[0]) * gcd(before[1], after[1])
    old = {device for unit in start for device in unit}
    new = {device for unit in goal for device in unit} - old
    gathered = len(old) * Fraction(1, common) - len(start)
    return gathered + Fraction(len(new), common)
