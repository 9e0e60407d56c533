"""Who sends what to whom, per class of identical tensors; nothing here is expanded to single tensors and kinds.

Every range that a target lacks becomes a ribbon, cut among the devices that own the range. The result depends on the
order of the devices alone, so it is the same on every rank, and for jobs that are alike (see `exchanges`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus.core import EMU, StateSchema, TensorSpec, TransitionError
from nereus.transition.classes import TensorClass, classes, layouts_of
from nereus.transition.ribbons import Ribbon, Segment, deal


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
class _Range:
    """What one ribbon is about: indices [start, start + rows of the ribbon) of the cut dim of a class."""

    members: TensorClass
    start: int
    ribbon: Ribbon

    def flow(self, part: Segment) -> Flow:
        """A segment of the ribbon."""
        tensors = self.members.tensors[part.first : part.first + part.count]
        bounds = (self.start + part.start, self.start + part.stop)
        return Flow(tensors, self.members.row_elements, *bounds, part.source, part.target)


def flows(schema: StateSchema, job: Job, lacking: bool = True, node_of: Mapping[int, int] | None = None) -> list[Flow]:
    """The flows of a job, the senders' loads balanced.

    With `lacking`, a target's own source shard is subtracted; without, what it can copy from itself is a flow from
    the device to itself. `node_of` makes owners on the target's node the only ones asked where there are any.
    """
    ranges: list[_Range] = []
    found: list[Flow] = []
    for members in classes(schema, layouts_of((*job.sources, *job.targets))):
        _collect(job, members, lacking, node_of, ranges, found)
    found.extend(ranges[index].flow(part) for index, part in deal([entry.ribbon for entry in ranges]))
    return found


def _collect(
    job: Job,
    members: TensorClass,
    lacking: bool,
    node_of: Mapping[int, int] | None,
    ranges: list[_Range],
    own: list[Flow],
) -> None:
    """Add the ranges of one class; copies of a device from itself go to `own` at once."""
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
        ribbon = Ribbon(near, tuple(sorted(devices)), len(members.tensors), high - low, members.row_elements)
        ranges.append(_Range(members, low, ribbon))


def _near(owners: Sequence[int], device: int, node_of: Mapping[int, int] | None) -> tuple[int, ...]:
    if not node_of or device not in node_of:
        return tuple(owners)
    node = node_of[device]
    return tuple(owner for owner in owners if node_of.get(owner) == node) or tuple(owners)


def _missing(members: TensorClass, start: int, stop: int, job: Job) -> TransitionError:
    units = "; ".join(map(str, job.sources)) or "none"
    return TransitionError(f"no source holds indices {start} to {stop} of {members.sample.name}; sources: {units}")
