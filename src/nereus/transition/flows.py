"""Who sends what to whom, per class of identical tensors; nothing here is expanded to single tensors and kinds.

Every range that a target lacks is a *ribbon*: (targets x identical tensors x indices) laid end to end and cut among the
devices that own the range, so that the senders' loads come out even. The result is the same on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus.core import EMU, StateSchema, TensorSpec, TransitionError
from nereus.transition.classes import TensorClass, classes, layouts_of

SNAP = 1 / 8
"""A cut moves to the nearest whole tensor when that shifts at most this part of a sender's share."""
WHOLE = 1 / 4
"""A ribbon smaller than this part of the mean load of its owners goes to one sender uncut."""


@dataclass(frozen=True, slots=True)
class Job:
    """Build `targets` out of shards of `sources`."""

    sources: tuple[EMU, ...]
    targets: tuple[EMU, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """Indices [start, stop) of the cut dim of each of `tensors`, all of one class, from `source` to `target`."""

    tensors: tuple[TensorSpec, ...]
    row_elements: int
    start: int
    stop: int
    source: int
    target: int

    @property
    def elements(self) -> int:
        """Elements of one kind, all tensors together."""
        return len(self.tensors) * (self.stop - self.start) * self.row_elements


@dataclass(frozen=True, slots=True)
class _Ribbon:
    job: int
    members: TensorClass
    start: int
    stop: int
    owners: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def row_count(self) -> int:
        return len(self.targets) * len(self.members.tensors) * (self.stop - self.start)

    @property
    def elements(self) -> int:
        return self.row_count * self.members.row_elements


def flows(
    schema: StateSchema,
    jobs: Sequence[Job],
    lacking: bool = True,
    node_of: Mapping[int, int] | None = None,
) -> tuple[tuple[Flow, ...], ...]:
    """The flows of each job; loads are balanced over all jobs together.

    With `lacking`, a target's own source shard is subtracted; without, what it can copy from itself is a flow from
    the device to itself. `node_of` makes owners on the target's node the only ones asked where there are any.
    """
    jobs = [Job(_ordered(job.sources), _ordered(job.targets)) for job in jobs]
    groups = classes(schema, layouts_of(unit for job in jobs for unit in (*job.sources, *job.targets)))
    ribbons: list[_Ribbon] = []
    found: list[list[Flow]] = [[] for _ in jobs]
    for members in groups:
        for index, job in enumerate(jobs):
            _collect(index, job, members, lacking, node_of, ribbons, found[index])
    # Ranges with few owners leave no choice, so they come first; the sort is stable.
    ribbons.sort(key=lambda ribbon: (len(ribbon.owners), -ribbon.elements))
    total = sum(ribbon.elements for ribbon in ribbons)
    senders = len({owner for ribbon in ribbons for owner in ribbon.owners})
    loads: dict[int, float] = defaultdict(float)
    for ribbon in ribbons:
        whole = ribbon.elements * senders < WHOLE * total
        found[ribbon.job].extend(_deal(ribbon, loads, whole))
    return tuple(tuple(entries) for entries in found)


def _ordered(units: Sequence[EMU]) -> tuple[EMU, ...]:
    return tuple(sorted(units, key=lambda unit: unit.devices))


def _collect(
    index: int,
    job: Job,
    members: TensorClass,
    lacking: bool,
    node_of: Mapping[int, int] | None,
    ribbons: list[_Ribbon],
    own: list[Flow],
) -> None:
    """Add the ribbons of one job and class; copies of a device from itself go to `own` at once."""
    owned = {device: region for unit in job.sources for device, region in members.regions(unit).items()}
    marks = sorted({mark for region in owned.values() for mark in region})
    owners: list[list[int]] = [[] for _ in marks]
    for device in sorted(owned):
        start, stop = owned[device]
        for piece in range(bisect_left(marks, start), bisect_left(marks, stop)):
            owners[piece].append(device)
    wanted: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for unit in job.targets:
        for device, (start, stop) in members.regions(unit).items():
            first, last = max(bisect_right(marks, start) - 1, 0), bisect_left(marks, stop)
            if not marks or marks[0] > start or marks[-1] < stop:
                raise _missing(members, start, stop, job)
            for piece in range(first, last):
                low, high = max(start, marks[piece]), min(stop, marks[piece + 1])
                held = owned.get(device, (0, 0))
                if held[0] <= low and high <= held[1]:
                    if not lacking:
                        own.append(Flow(members.tensors, members.row_elements, low, high, device, device))
                    continue
                if not owners[piece]:
                    raise _missing(members, low, high, job)
                near = _near(owners[piece], device, node_of)
                wanted.setdefault((low, high, near), []).append(device)
    for (low, high, near), devices in wanted.items():
        ribbons.append(_Ribbon(index, members, low, high, near, tuple(sorted(devices))))


def _near(owners: Sequence[int], device: int, node_of: Mapping[int, int] | None) -> tuple[int, ...]:
    if node_of is None:
        return tuple(owners)
    return tuple(owner for owner in owners if node_of[owner] == node_of[device]) or tuple(owners)


def _missing(members: TensorClass, start: int, stop: int, job: Job) -> TransitionError:
    units = "; ".join(map(str, job.sources)) or "none"
    return TransitionError(f"no source holds indices {start} to {stop} of {members.sample.name}; sources: {units}")


def _deal(ribbon: _Ribbon, loads: dict[int, float], whole: bool) -> list[Flow]:
    """Cut one ribbon among its owners and add the shares to `loads`."""
    rows, row_elements = ribbon.row_count, ribbon.members.row_elements
    if whole or len(ribbon.owners) == 1:
        shares = [0.0] * len(ribbon.owners)
        shares[min(range(len(ribbon.owners)), key=lambda i: loads[ribbon.owners[i]])] = float(rows)
    else:
        levels = [loads[owner] / row_elements for owner in ribbon.owners]
        shares = _fill(levels, rows)
    length = ribbon.stop - ribbon.start
    done, ideal, dealt = 0, 0.0, []
    for owner, share in zip(ribbon.owners, shares, strict=True):
        ideal += share
        end = rows if ideal >= rows - 0.5 else _snap(ideal, length, share)
        if end > done:
            loads[owner] += (end - done) * row_elements
            dealt.extend(_segment(ribbon, owner, done, end))
            done = end
    return dealt


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


def _segment(ribbon: _Ribbon, owner: int, begin: int, end: int) -> list[Flow]:
    """Positions [begin, end) of a ribbon as flows: a cut tensor, whole tensors, a cut tensor, for each target."""
    length, tensors = ribbon.stop - ribbon.start, ribbon.members.tensors
    made: list[Flow] = []
    while begin < end:
        place, row = divmod(begin, length)
        target, member = divmod(place, len(tensors))
        if row or end - begin < length:
            count, stop = 1, min(length, row + end - begin)
        else:
            count, stop = min(len(tensors) - member, (end - begin) // length), length
        chosen = tensors[member : member + count]
        bounds = (ribbon.start + row, ribbon.start + stop)
        made.append(Flow(chosen, ribbon.members.row_elements, *bounds, owner, ribbon.targets[target]))
        begin += count * (stop - row)
    return made
