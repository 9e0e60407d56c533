"""Who sends what to whom, per class of identical tensors; nothing here is expanded to single tensors and kinds.

Every range that a target lacks becomes a ribbon, cut among the devices that own the range. The result depends on the
order of the devices alone, so it is the same on every rank, and for jobs that are alike (see `exchanges`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nereus.core import EMU, StateSchema, TensorSpec, TransitionError
from nereus.transition.classes import Family, TensorClass, classes, layouts_of
from nereus.transition.ribbons import Cut, Ribbon, Segment, cuts, segments

NOTHING = (0, 0)
"""The region of a device that has none."""


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

    def flows(self) -> tuple[Flow, ...]:
        """All of them, in order."""
        made = list(self.own)
        for index, owner, begin, end in self.cuts:
            found = self.ranges[index]
            made.extend(map(found.flow, segments(found.ribbon, owner, begin, end)))
        return tuple(made)


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
    for family, wanted, own in _families(schema, job, node_of):
        for members in family:
            tensors, step, row_elements = members.tensors, members.step, members.row_elements
            if not lacking:
                copies.extend(Flow(tensors, row_elements, low * step, high * step, at, at) for low, high, at in own)
            for low, high, owners, targets in wanted:
                ribbon = Ribbon(owners, targets, len(tensors), (high - low) * step, row_elements)
                ranges.append(Range(members, low * step, ribbon))
    return ranges, copies


def moved(
    schema: StateSchema, job: Job, lacking: bool = True, node_of: Mapping[int, int] | None = None
) -> dict[tuple[int, int], int]:
    """(source, target) → elements of one kind: the sums of the flows of `dealt`, found without them.

    What has one owner leaves no choice, so all its classes are counted at once; only the rest is cut.
    """
    total: dict[tuple[int, int], int] = defaultdict(int)
    loads: dict[int, float] = defaultdict(float)
    shared: list[Ribbon] = []
    for family, wanted, own in _families(schema, job, node_of):
        step_elements = sum(members.step_elements for members in family)
        for low, high, at in () if lacking else own:
            total[at, at] += (high - low) * step_elements
        for low, high, (owner, *others), targets in wanted:
            if not others:
                elements = (high - low) * step_elements
                loads[owner] += elements * len(targets)
                for target in targets:
                    total[owner, target] += elements
        many = [each for each in wanted if len(each[2]) > 1]
        for members in family if many else ():
            count, step, row_elements = len(members.tensors), members.step, members.row_elements
            shared.extend(
                Ribbon(owners, to, count, (high - low) * step, row_elements) for low, high, owners, to in many
            )
    for index, owner, begin, end in cuts(shared, loads):
        for target, elements in shared[index].parts(begin, end):
            total[owner, target] += elements
    return dict(total)


Wanted = list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]
"""(start, stop, owners, devices that lack it), in steps."""
Own = list[tuple[int, int, int]]
"""(start, stop, device): what a target can copy from itself, in steps."""


def _families(schema: StateSchema, job: Job, node_of: Mapping[int, int] | None) -> Iterator[tuple[Family, Wanted, Own]]:
    """Each family of classes, and what the targets lack and have of it."""
    for family in classes(schema, layouts_of((*job.sources, *job.targets))):
        yield family, *_collect(job, family[0], node_of)


def _collect(job: Job, members: TensorClass, node_of: Mapping[int, int] | None) -> tuple[Wanted, Own]:
    """What targets lack of a class, and what they can copy from themselves."""
    owned, needs = members.regions(job.sources), members.regions(job.targets)
    pieces = _Pieces(owned, node_of)
    alike: dict[object, tuple[Sequence[list[int]], Sequence[tuple[int, int]]]] = {}
    """(what a device needs, what it has, its node) → where it is entered, and the ranges that it copies."""
    wanted: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    own: Own = []
    for device, need in sorted(needs.items()):
        held, node = owned.get(device, NOTHING), node_of.get(device) if node_of else None
        found = alike.get((need, held, node))
        if found is None:
            lacked, copied = pieces.lacked(need, held, node)
            if lacked is None:
                raise _missing(members, *copied[0], job)
            found = alike[need, held, node] = [wanted.setdefault(each, []) for each in lacked], copied
        for targets in found[0]:
            targets.append(device)
        own.extend([(low, high, device) for low, high in found[1]])
    return [(*each, tuple(targets)) for each, targets in wanted.items()], own


class _Pieces:
    """The ranges between all marks where the region of an owner starts or stops, and the owners of each."""

    def __init__(self, owned: Mapping[int, tuple[int, int]], node_of: Mapping[int, int] | None) -> None:
        self._marks = marks = sorted({mark for region in set(owned.values()) for mark in region})
        self._node_of = node_of or {}
        place = {mark: index for index, mark in enumerate(marks)}
        self._owners: list[list[int]] = [[] for _ in marks]
        for device, (start, stop) in sorted(owned.items()):
            for piece in range(place[start], place[stop]):
                self._owners[piece].append(device)
        self._near: dict[tuple[int, int | None], tuple[int, ...]] = {}
        """(piece, node of who lacks it) → its owners that are asked."""

    def lacked(
        self, need: tuple[int, int], held: tuple[int, int], node: int | None
    ) -> tuple[list[tuple[int, int, tuple[int, ...]]] | None, list[tuple[int, int]]]:
        """(start, stop, owners that are asked) of what is not held of a need, and (start, stop) of what is.

        Of something that nobody has: None, and that alone.
        """
        (start, stop), marks = need, self._marks
        if not marks or marks[0] > start or marks[-1] < stop:
            return None, [need]
        lacked: list[tuple[int, int, tuple[int, ...]]] = []
        copied: list[tuple[int, int]] = []
        for piece in range(bisect_right(marks, start) - 1, bisect_left(marks, stop)):
            low, high = max(start, marks[piece]), min(stop, marks[piece + 1])
            if held[0] <= low and high <= held[1]:
                copied.append((low, high))
                continue
            if not self._owners[piece]:
                return None, [(low, high)]
            if (piece, node) not in self._near:
                self._near[piece, node] = self._asked(self._owners[piece], node)
            lacked.append((low, high, self._near[piece, node]))
        return lacked, copied

    def _asked(self, owners: Sequence[int], node: int | None) -> tuple[int, ...]:
        if node is None or len(owners) == 1:
            return tuple(owners)
        return tuple([owner for owner in owners if self._node_of.get(owner) == node]) or tuple(owners)


def _missing(members: TensorClass, start: int, stop: int, job: Job) -> TransitionError:
    units = "; ".join(map(str, job.sources)) or "none"
    low, high = start * members.step, stop * members.step
    return TransitionError(f"no source holds indices {low} to {high} of {members.sample.name}; sources: {units}")
