"""What no order can beat, in the model of a run: a lower bound of its span."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import ceil, log, log1p, log2, pow

from nereus.core import EMU, ModelStage
from nereus.transition.decompose import Build, LocalDAG
from nereus.transition.holders import Site


def bound_bytes(
    locals_: Sequence[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int], site: Site | None = None
) -> float:
    """The largest of: what one device takes part in, how fast new replicas double, how releases wait for copies, and
    what has to cross nodes.

    Several of `locals_` may be of one model-stage: parts of it that share no device, each for as many `copies`.
    """
    own: dict[ModelStage, list[LocalDAG]] = {}
    for local in locals_:
        own.setdefault(local.model_stage, []).append(local)
    stages = list(own.values())
    found = max(_devices(stages), *map(_doubling, stages), _releasing(stages, used, capacity)) if stages else 0.0
    return found if site is None or site.far == 1 else max([found, *(_crossing(parts, site) for parts in stages)])


def _crossing(parts: Sequence[LocalDAG], site: Site) -> float:
    """A group whose unit lies on several nodes crosses them; and so does the first on a node that holds nothing."""
    before = {site.node_of.get(device, -1) for local in parts for unit in _old(local) for device in unit.devices}
    apart, found = set[int](), 0.0
    first: dict[int, int] = {}
    for build in _builds(parts):
        nodes = {site.node_of.get(device, -1) for unit in build.goals for device in unit.devices}
        if len(nodes) > 1:
            apart |= nodes
            found = max(found, site.far * build.received_bytes if _alone(build) else 0.0)
        else:
            (node,) = nodes
            first[node] = min(build.received_bytes, first.get(node, build.received_bytes))
    fresh = (size for node, size in first.items() if node not in before and node not in apart)
    return max(found, site.far * max(fresh, default=0))


def _old(local: LocalDAG) -> tuple[EMU, ...]:
    """The units of the start."""
    return (*local.kept, *local.left)


def _builds(parts: Iterable[LocalDAG]) -> Iterator[Build]:
    """One of each that is alike."""
    return (build for local in parts for build in local.builds)


def _holding(parts: Iterable[LocalDAG]) -> int:
    """Devices that hold a unit at the start, copies included."""
    return sum(local.copies * sum(unit.layout.size for unit in _old(local)) for local in parts)


def _building(parts: Iterable[LocalDAG], reading: bool = False) -> int:
    """Devices that units are built on, copies included; with `reading`, of those that read their own sources alone."""
    return sum(
        local.copies * sum(len(build.acquires) for build in local.builds if build.sources or not reading)
        for local in parts
    )


def _devices(stages: Sequence[Sequence[LocalDAG]]) -> float:
    """A device takes part in one group at a time: those that build on it, and as long as all bytes need to be sent."""
    taken: dict[int, float] = defaultdict(float)
    copies: dict[int, int] = {}
    sent = 0
    for parts in stages:
        senders = _holding(parts) + _building(parts)
        for local in parts:
            for unit in _old(local):
                copies.update(dict.fromkeys(unit.devices, local.copies))
            for build in local.builds:
                copies.update(dict.fromkeys(build.acquires, local.copies))
                sent += 0 if build.sources else local.copies * build.moved_bytes
                if build.received_bytes:
                    lasts = _lasts(build, senders)
                    for device in build.acquires:
                        taken[device] += lasts
    every = sum(copies[device] * lasts for device, lasts in taken.items())
    return max(max(taken.values(), default=0.0), (every + sent) / max(1, sum(copies.values())))


def _lasts(build: Build, senders: int) -> float:
    """The least that a group takes."""
    return max(float(build.received_bytes), build.moved_bytes / senders if _alone(build) else 0.0)


def _alone(build: Build) -> bool:
    """Whether it makes one unit. Several may also be made one by one, for less at a time and with less room."""
    return len(build.goals) == 1


def _doubling(parts: Sequence[LocalDAG]) -> float:
    """While a new replica is received, as many others can be as there are devices to send: devices at most double.

    Units of fewer devices than one replica take longer, and may each feed one meanwhile.
    """
    fresh = [build for build in _builds(parts) if not build.sources]
    received = min((build.received_bytes for build in fresh), default=0)
    if not received:
        return 0.0
    size = min(len(build.acquires) for build in fresh)
    units = [unit for local in parts for unit in _old(local)]
    units.extend(goal for build in _builds(parts) for goal in build.goals)
    senders = _holding(parts) + _building(parts, reading=True)
    count = sum(local.copies * sum(not build.sources for build in local.builds) for local in parts)
    wanted = senders + count * size
    if min(unit.layout.size for unit in units) >= max(len(build.acquires) for build in fresh):
        return received * ceil(log2(wanted / senders) - 1e-9)
    first = max(1.0, min(build.moved_bytes for build in fresh) / senders / received)
    growth = received * max(len(build.acquires) / build.moved_bytes for build in fresh)
    return received * _rounds(wanted / senders, growth, first)


def _rounds(times: float, growth: float, first: float) -> float:
    """How often `received_bytes` it takes until there are `times` as many devices, where few may send to more.

    What a device sends in d of these makes at most `growth` d new ones; d is 1 at least, `first` where all begins. Of
    the ways to spend T in so many parts, equal ones make the most: (1 + growth T / parts)^parts of one device.
    """
    found: list[float] = []
    for parts in range(1, max(1, ceil(log(times) / log1p(growth) - 1e-9)) + 1):
        equal = (pow(times, 1 / parts) - 1) / growth
        if equal >= first:
            found.append(parts * equal)
        elif parts == 1:
            found.append(first)
        else:
            rest = (pow(times / (1 + growth * first), 1 / (parts - 1)) - 1) / growth
            found.append(first + (parts - 1) * max(1.0, rest))
    return min(found)


def _releasing(stages_: Sequence[Sequence[LocalDAG]], used: Mapping[int, int], capacity: Mapping[int, int]) -> float:
    """A group that needs all units of a model-stage to leave waits until that has its first new one."""
    waits: set[tuple[ModelStage, float, int, frozenset[ModelStage]]] = set()
    """Model-stage, how long a group takes at least as the first and at all, and what it waits for."""
    locals_ = [local for parts in stages_ for local in parts]
    on = _leaving(locals_, _crowded(locals_, used, capacity))
    left = {
        parts[0].model_stage: sum(local.copies * len(local.left) for local in parts)
        for parts in stages_
        if not any(local.kept or local.elsewhere for local in parts)
    }
    for parts in stages_:
        senders = _holding(parts)
        for build in _builds(parts):
            waited = _waited(build, on, used, capacity) if on and _alone(build) else {}
            stages = frozenset(ms for ms, units in waited.items() if len(units) == left.get(ms))
            first = _lasts(build, senders)
            waits.add((parts[0].model_stage, first, build.received_bytes, stages))
    copied: dict[ModelStage, float] = {}
    found = 0.0
    for _ in range(len(stages_) + 1):
        ends: dict[ModelStage, float] = {}
        for ms, first, received, stages in waits:
            start = max((copied.get(other, 0.0) for other in stages), default=0.0)
            ends[ms] = min(start + first, ends.get(ms, start + first))
            found = max(found, start + received)
        copied = ends
    return max(found, max(copied.values(), default=0.0))


def _crowded(locals_: Sequence[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int]) -> set[int]:
    """Devices where some group has no room before anything leaves."""
    return {
        device
        for local in locals_
        for build in local.builds
        for device, wanted in build.acquires.items()
        if device in capacity and used.get(device, 0) + wanted > capacity[device]
    }


def _leaving(locals_: Sequence[LocalDAG], crowded: Collection[int]) -> dict[int, list[tuple[EMU, int]]]:
    """Device of `crowded` → units on it that go, and their bytes there."""
    found: dict[int, list[tuple[EMU, int]]] = defaultdict(list)
    for local in locals_:
        for unit in local.left if crowded else ():
            for device, size in zip(unit.devices, local.pricing.stored(unit.layout), strict=True):
                if device in crowded:
                    found[device].append((unit, size))
    return found


def _waited(
    build: Build, on: Mapping[int, Sequence[tuple[EMU, int]]], used: Mapping[int, int], capacity: Mapping[int, int]
) -> dict[ModelStage, set[EMU]]:
    """Model-stage → its units that have to leave before `build` has room."""
    found: dict[ModelStage, set[EMU]] = {}
    for device, wanted in build.acquires.items():
        if device in on and (over := used.get(device, 0) + wanted - capacity[device]) > 0:
            most = sum(size for _, size in on[device])
            for unit, size in on[device]:
                if most - size < over:
                    found.setdefault(unit.model_stage, set()).add(unit)
    return found
