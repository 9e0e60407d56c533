"""Who sends what to whom, per class of identical tensors; nothing here is expanded to single tensors and kinds.

Every range that a target lacks becomes a ribbon, cut among the devices that own the range. The result depends on the
order of the devices alone, so it is the same on every rank, and for jobs that are alike (see `exchanges`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from nereus.core import EMU, Layout, StateSchema, TensorSpec, TransitionError
from nereus.transition.classes import Family, TensorClass, layouts_of
from nereus.transition.lacks import Part, lacks_of
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
    found = _lacked(schema, job, node_of, summed=False)
    ranges: list[Range] = []
    copies: list[Flow] = []
    for index, family in enumerate(found.families):
        for members in family:
            tensors, step, row_elements = members.tensors, members.step, members.row_elements
            if not lacking:
                own = found.own.get(index, ())
                copies.extend(Flow(tensors, row_elements, low * step, high * step, at, at) for low, high, at in own)
            for low, high, owners, targets in found.wanted.get(index, ()):
                ribbon = Ribbon(owners, targets, len(tensors), (high - low) * step, row_elements)
                ranges.append(Range(members, low * step, ribbon))
    return ranges, copies


def moved(
    schema: StateSchema, job: Job, lacking: bool = True, node_of: Mapping[int, int] | None = None
) -> dict[tuple[int, int], int]:
    """(source, target) → elements of one kind: the sums of the flows of `dealt`, found without them.

    What has one owner leaves no choice, so all of it is counted at once; only the rest is cut.
    """
    found = _lacked(schema, job, node_of, summed=True)
    total, loads = found.alone, defaultdict[int, float](float)
    for (owner, _), elements in total.items():
        loads[owner] += elements
    shared = [
        Ribbon(owners, targets, len(members.tensors), (high - low) * members.step, members.row_elements)
        for index, wanted in sorted(found.wanted.items())
        for members in found.families[index]
        for low, high, owners, targets in wanted
    ]
    for index, owner, begin, end in cuts(shared, loads):
        for target, elements in shared[index].parts(begin, end):
            total[owner, target] += elements
    for index, own in () if lacking else found.own.items():
        step_elements = sum(members.step_elements for members in found.families[index])
        for low, high, at in own:
            total[at, at] += (high - low) * step_elements
    return dict(total)


@dataclass(frozen=True, slots=True)
class _Lacked:
    """What the targets of a job lack and have, by the index of a family, in steps of it."""

    families: Sequence[Family]
    alone: dict[tuple[int, int], int]
    """(owner, device that lacks it) → elements of what is only summed."""
    wanted: Mapping[int, Sequence[tuple[int, int, tuple[int, ...], tuple[int, ...]]]]
    """(start, stop, owners that are asked, devices that lack it), in the order of the first of these devices."""
    own: Mapping[int, Sequence[tuple[int, int, int]]]
    """(start, stop, device): what a device can copy from itself."""


def _lacked(schema: StateSchema, job: Job, node_of: Mapping[int, int] | None, summed: bool) -> _Lacked:
    """What the targets of a job lack and have. If `summed`, of what has one owner nothing but the sums."""
    known = lacks_of(schema).of(layouts_of(job.sources), layouts_of(job.targets))
    positions = _positions(job.sources, known.source_base)
    owners = _Owners(positions, node_of)
    alone: dict[tuple[int, int], int] = defaultdict(int)
    wanted: dict[tuple[Part, tuple[int, ...]], list[int]] = {}
    own: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    alike: dict[object, tuple[Sequence[tuple[int, int]], Sequence[list[int]], Sequence[Part]]] = {}
    """(position, position in the sources, node) → elements by owner, where it is entered, and what it copies."""
    for device, position in sorted(_positions(job.targets, known.target_base).items()):
        key = position, positions.get(device, -1), node_of.get(device) if node_of else None
        found = alike.get(key)
        if found is None:
            lacks, copied = known.of(*key[:2])
            asked = [(owners.of(lack.positions, key[2]), lack) for lack in lacks]
            for who, lack in asked:
                if not who:
                    raise _missing(known.families, lack.parts[0], job)
            sums = [(who[0], lack.elements) for who, lack in asked if summed and len(who) == 1]
            rest = [(who, part) for who, lack in asked if not summed or len(who) > 1 for part in lack.parts]
            found = alike[key] = sums, [wanted.setdefault((part, who), []) for who, part in rest], copied
        for owner, elements in found[0]:
            alone[owner, device] += elements
        for targets in found[1]:
            targets.append(device)
        for family, start, stop in found[2]:
            own[family].append((start, stop, device))
    return _Lacked(known.families, alone, _in_order(wanted), own)


def _positions(units: Sequence[EMU], base: Mapping[Layout, int]) -> dict[int, int]:
    """Device → the number of its position; of two, the later."""
    found: dict[int, int] = {}
    for unit in units:
        found.update(zip(unit.devices, count(base[unit.layout]), strict=False))
    return found


def _in_order(
    wanted: Mapping[tuple[Part, tuple[int, ...]], list[int]],
) -> dict[int, list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]]:
    """By family, the ranges in the order of the first device that lacks each."""
    found: dict[int, list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for ((family, start, stop), owners), targets in wanted.items():
        found[family].append((start, stop, owners, tuple(targets)))
    for ranges in found.values():
        ranges.sort(key=lambda each: (each[3][0], each[0]))
    return found


class _Owners:
    """The devices at positions of the sources."""

    def __init__(self, positions: Mapping[int, int], node_of: Mapping[int, int] | None) -> None:
        self._node_of = node_of or {}
        self._at: dict[int, list[int]] = defaultdict(list)
        for device, position in sorted(positions.items()):
            self._at[position].append(device)
        self._known: dict[tuple[int, ...], tuple[tuple[int, ...], Mapping[int, tuple[int, ...]]]] = {}
        """Positions → all devices there, and those on each node."""

    def of(self, positions: tuple[int, ...], node: int | None) -> tuple[int, ...]:
        """Whom a device on a node asks for what all of some positions own: those on its node, where there are any."""
        if positions not in self._known:
            every = sorted([device for position in positions for device in self._at[position]])
            near: dict[int, list[int]] = defaultdict(list)
            for device in every if len(every) > 1 else ():
                if device in self._node_of:
                    near[self._node_of[device]].append(device)
            self._known[positions] = tuple(every), {at: tuple(devices) for at, devices in near.items()}
        every_one, by_node = self._known[positions]
        return every_one if node is None else by_node.get(node, every_one)


def _missing(families: Sequence[Family], part: Part, job: Job) -> TransitionError:
    units = "; ".join(map(str, job.sources)) or "none"
    family, start, stop = part
    members = families[family][0]
    low, high = start * members.step, stop * members.step
    return TransitionError(f"no source holds indices {low} to {high} of {members.sample.name}; sources: {units}")
