"""Who sends what to whom, per class of identical tensors; nothing here is expanded to single tensors and kinds.

Every range that a target lacks becomes a ribbon, cut among the devices that own the range. The result depends on the
order of the devices alone, so it is the same on every rank, and for jobs that are alike (see `exchanges`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus.core import EMU, StateSchema, TensorSpec, TransitionError
from nereus.transition.classes import TensorClass, classes, layouts_of
from nereus.transition.ribbons import Cut, Ribbon, Segment, cuts, segments


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
class Range:
    """What one ribbon is about: indices [start, start + rows of the ribbon) of the cut dim of a class."""

    members: TensorClass
    start: int
    ribbon: Ribbon

    def flow(self, part: Segment) -> Flow:
        """A segment of the ribbon."""
        tensors = self.members.tensors[part.first : part.first + part.count]
        bounds = (self.start + part.start, self.start + part.stop)
        return Flow(tensors, self.members.row_elements, *bounds, part.source, part.target)


@dataclass(frozen=True, slots=True)
class Deal:
    """The flows of a job: `own` are copies of devices from themselves, the others are made on request."""

    own: tuple[Flow, ...]
    ranges: tuple[Range, ...]
    cuts: tuple[Cut, ...]
    """Who sends what of `ranges`."""

    @property
    def size(self) -> int:
        """Copies, and targets of all cuts: about the number of flows."""
        lengths = [entry.ribbon.tensors * entry.ribbon.rows for entry in self.ranges]
        return len(self.own) + sum(
            1 + (end - 1) // lengths[at] - begin // lengths[at] for at, _, begin, end in self.cuts
        )

    def flows(self) -> tuple[Flow, ...]:
        """All of them, in order."""
        made = list(self.own)
        for index, owner, begin, end in self.cuts:
            found = self.ranges[index]
            made.extend(map(found.flow, segments(found.ribbon, owner, begin, end)))
        return tuple(made)

    def pairs(self) -> dict[tuple[int, int], int]:
        """(source, target) → elements of one kind."""
        total: dict[tuple[int, int], int] = defaultdict(int)
        for flow in self.own:
            total[flow.source, flow.target] += flow.elements
        for index, owner, begin, end in self.cuts:
            ribbon = self.ranges[index].ribbon
            length, size = ribbon.tensors * ribbon.rows, ribbon.row_size
            if end - begin == length * len(ribbon.targets):
                for target in ribbon.targets:
                    total[owner, target] += length * size
                continue
            for place in range(begin // length, -(-end // length)):
                rows = min(end, (place + 1) * length) - max(begin, place * length)
                total[owner, ribbon.targets[place]] += rows * size
        return dict(total)


def dealt(schema: StateSchema, job: Job, lacking: bool = True, node_of: Mapping[int, int] | None = None) -> Deal:
    """Who sends what to whom in a job, the senders' loads balanced.

    With `lacking`, a target's own source shard is subtracted; without, what it can copy from itself is a flow from
    the device to itself. `node_of` makes owners on the target's node the only ones asked where there are any.
    """
    ranges, own = ranges_of(schema, job, lacking, node_of)
    return Deal(tuple(own), tuple(ranges), tuple(cuts([entry.ribbon for entry in ranges])))


def ranges_of(
    schema: StateSchema, job: Job, lacking: bool = True, node_of: Mapping[int, int] | None = None
) -> tuple[list[Range], list[Flow]]:
    """What the targets of a job lack, each range with who holds it and who wants it; and copies of devices from
    themselves, unless `lacking`."""
    ranges: list[Range] = []
    copies: list[Flow] = []
    for family in classes(schema, layouts_of((*job.sources, *job.targets))):
        found, own = _collect(job, family[0], node_of)
        wanted = [(low, high, owners, tuple(targets)) for (low, high, owners), targets in found.items()]
        for members in family:
            tensors, step, row_elements = members.tensors, members.step, members.row_elements
            if not lacking:
                copies.extend(Flow(tensors, row_elements, low * step, high * step, at, at) for low, high, at in own)
            for low, high, owners, targets in wanted:
                ribbon = Ribbon(owners, targets, len(tensors), (high - low) * step, row_elements)
                ranges.append(Range(members, low * step, ribbon))
    return ranges, copies


Wanted = dict[tuple[int, int, tuple[int, ...]], list[int]]
"""(start, stop, owners) → devices that lack it."""


def _collect(
    job: Job, members: TensorClass, node_of: Mapping[int, int] | None
) -> tuple[Wanted, list[tuple[int, int, int]]]:
    """What targets lack of a class, and what they can copy from themselves: (start, stop, device). In steps."""
    owned = {device: region for unit in job.sources for device, region in members.regions(unit).items()}
    marks = sorted({mark for region in owned.values() for mark in region})
    owners: list[list[int]] = [[] for _ in marks]
    for device in sorted(owned):
        start, stop = owned[device]
        for piece in range(bisect_left(marks, start), bisect_left(marks, stop)):
            owners[piece].append(device)
    wanted: Wanted = {}
    near: dict[tuple[int, int | None], tuple[int, ...]] = {}
    """(piece, node of who lacks it) → its owners that are asked."""
    own: list[tuple[int, int, int]] = []
    needs = {device: region for unit in job.targets for device, region in members.regions(unit).items()}
    for device, (start, stop) in sorted(needs.items()):
        if not marks or marks[0] > start or marks[-1] < stop:
            raise _missing(members, start, stop, job)
        held, node = owned.get(device, (0, 0)), node_of.get(device) if node_of else None
        for piece in range(bisect_right(marks, start) - 1, bisect_left(marks, stop)):
            low, high = max(start, marks[piece]), min(stop, marks[piece + 1])
            if held[0] <= low and high <= held[1]:
                own.append((low, high, device))
                continue
            if not owners[piece]:
                raise _missing(members, low, high, job)
            asked = near.get((piece, node))
            if asked is None:
                asked = near[piece, node] = _near(owners[piece], device, node_of)
            wanted.setdefault((low, high, asked), []).append(device)
    return wanted, own


def _near(owners: Sequence[int], device: int, node_of: Mapping[int, int] | None) -> tuple[int, ...]:
    if not node_of or device not in node_of:
        return tuple(owners)
    node = node_of[device]
    return tuple(owner for owner in owners if node_of.get(owner) == node) or tuple(owners)


def _missing(members: TensorClass, start: int, stop: int, job: Job) -> TransitionError:
    units = "; ".join(map(str, job.sources)) or "none"
    low, high = start * members.step, stop * members.step
    return TransitionError(f"no source holds indices {low} to {high} of {members.sample.name}; sources: {units}")
