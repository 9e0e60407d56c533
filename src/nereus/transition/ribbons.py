"""Cuts ranges that several owners hold among them, so that the senders' loads come out even.

A *ribbon* is one range that some targets lack, of a number of identical tensors, laid end to end: (targets x tensors x
rows). Every rank deals the same ribbons the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

SNAP = 1 / 8
"""A cut moves to the nearest whole tensor when that shifts at most this part of a sender's share."""
WHOLE = 1 / 4
"""A ribbon smaller than this part of the mean load of its owners goes to one sender uncut."""


@dataclass(frozen=True, slots=True)
class Ribbon:
    """`rows` rows of `row_size` (elements or bytes) of each of `tensors` identical tensors, for each of `targets`."""

    owners: tuple[int, ...]
    targets: tuple[int, ...]
    tensors: int
    rows: int
    row_size: int

    @property
    def size(self) -> int:
        """What is sent in all."""
        return len(self.targets) * self.tensors * self.rows * self.row_size

    def parts(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """(target, what it gets) of the positions [begin, end)."""
        length = self.tensors * self.rows
        while begin < end:
            place = begin // length
            stop = min(end, (place + 1) * length)
            yield self.targets[place], (stop - begin) * self.row_size
            begin = stop


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of the tensors [first, first + count), from `source` to `target`."""

    source: int
    target: int
    first: int
    count: int
    start: int
    stop: int


Cut = tuple[int, int, int, int]
"""(index of a ribbon, sender, begin, end): who sends the positions [begin, end) of a ribbon."""


def deal(ribbons: Sequence[Ribbon]) -> list[tuple[int, Segment]]:
    """(index of the ribbon, segment) for all ribbons; loads are balanced over all of them together."""
    return [
        (index, segment)
        for index, owner, begin, end in cuts(ribbons)
        for segment in segments(ribbons[index], owner, begin, end)
    ]


def cuts(ribbons: Sequence[Ribbon], sent: Mapping[int, float] = MappingProxyType({})) -> list[Cut]:
    """The same as positions of the ribbons, where owners have `sent` something before: more ribbons of one owner."""
    sizes = [ribbon.size for ribbon in ribbons]
    # Ranges with few owners leave no choice, so they come first; the sort is stable.
    order = sorted(range(len(ribbons)), key=lambda index: (len(ribbons[index].owners), -sizes[index]))
    least = WHOLE * (sum(sizes) + sum(sent.values()))
    senders = len({owner for owners in {ribbon.owners for ribbon in ribbons} for owner in owners} | sent.keys())
    loads: dict[int, float] = defaultdict(float, sent)
    found: list[Cut] = []
    for index in order:
        found.extend(_cut(index, ribbons[index], sizes[index], loads, sizes[index] * senders < least))
    return found


def _cut(index: int, ribbon: Ribbon, size: int, loads: dict[int, float], whole: bool) -> list[Cut]:
    """Cut one ribbon among its owners and add the shares to `loads`."""
    rows, owners = len(ribbon.targets) * ribbon.tensors * ribbon.rows, ribbon.owners
    if whole or len(owners) == 1:
        owner = owners[0] if len(owners) == 1 else min(owners, key=loads.__getitem__)
        loads[owner] += size
        return [(index, owner, 0, rows)]
    shares = _fill([loads[owner] / ribbon.row_size for owner in owners], rows)
    done, ideal = 0, 0.0
    found: list[Cut] = []
    for owner, share in zip(owners, shares, strict=True):
        ideal += share
        end = rows if ideal >= rows - 0.5 else _snap(ideal, ribbon.rows, share)
        if end > done:
            loads[owner] += (end - done) * ribbon.row_size
            found.append((index, owner, done, end))
            done = end
    return found


def _fill(levels: Sequence[float], amount: float) -> list[float]:
    """What to add to each level so that `amount` in all makes the lowest ones equal (water filling)."""
    total, surface = amount, 0.0
    ordered = sorted(levels)
    for count, level in enumerate(ordered, start=1):
        total += level
        surface = total / count
        if count == len(ordered) or surface <= ordered[count]:
            break
    return [max(0.0, surface - level) for level in levels]


def _snap(position: float, length: int, share: float) -> int:
    nearest = round(position / length) * length
    return nearest if abs(nearest - position) <= SNAP * share else round(position)


def segments(ribbon: Ribbon, owner: int, begin: int, end: int) -> list[Segment]:
    """Positions [begin, end) of a ribbon: a cut tensor, whole tensors, a cut tensor, for each target."""
    rows = ribbon.rows
    made: list[Segment] = []
    while begin < end:
        place, row = divmod(begin, rows)
        target, first = divmod(place, ribbon.tensors)
        if row or end - begin < rows:
            count, stop = 1, min(rows, row + end - begin)
        else:
            count, stop = min(ribbon.tensors - first, (end - begin) // rows), rows
        made.append(Segment(owner, ribbon.targets[target], first, count, row, stop))
        begin += count * (stop - row)
    return made
