"""What no order can beat, in the model of a run: a lower bound of its span."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import ceil, log, log1p, log2, pow

from nereus.core import EMU, ModelStage
from nereus.transition.decompose import Build, LocalDAG
from nereus.transition.holders import Site


def bound_bytes(
    locals_: Sequence[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int], site: Site | None = None
) -> float:
    """The largest of: what one device takes part in, how fast new replicas double, how releases wait for copies, and
    what has to cross nodes."""
    doubling = max(map(_doubling, locals_), default=0.0)
    found = max(_devices(locals_), doubling, _releasing(locals_, used, capacity))
    return found if site is None or site.far == 1 else max([found, *(_crossing(local, site) for local in locals_)])


def _crossing(local: LocalDAG, site: Site) -> float:
    """A group whose unit lies on several nodes crosses them; and so does the first on a node that holds nothing."""
    before = {site.node_of.get(device, -1) for unit in (*local.kept, *local.left) for device in unit.devices}
    apart, found = set[int](), 0.0
    first: dict[int, int] = {}
    for build in local.builds:
        nodes = {site.node_of.get(device, -1) for unit in build.goals for device in unit.devices}
        if len(nodes) > 1:
            apart |= nodes
            found = max(found, site.far * build.received_bytes if _alone(build) else 0.0)
        else:
            (node,) = nodes
            first[node] = min(build.received_bytes, first.get(node, build.received_bytes))
    fresh = (size for node, size in first.items() if node not in before and node not in apart)
    return max(found, site.far * max(fresh, default=0))


def _devices(locals_: Sequence[LocalDAG]) -> float:
    """A device takes part in one group at a time: those that build on it, and as long as all bytes need to be sent."""
    taken: dict[int, float] = defaultdict(float)
    sent, devices = 0, set[int]()
    for local in locals_:
        senders = sum(unit.layout.size for unit in (*local.kept, *local.left))
        senders += sum(len(build.acquires) for build in local.builds)
        for unit in (*local.kept, *local.left):
            devices.update(unit.devices)
        for build in local.builds:
            devices.update(build.acquires)
            sent += 0 if build.sources else build.moved_bytes
            if build.received_bytes:
                lasts = _lasts(build, senders)
                for device in build.acquires:
                    taken[device] += lasts
    return max(max(taken.values(), default=0.0), (sum(taken.values()) + sent) / max(1, len(devices)))


def _lasts(build: Build, senders: int) -> float:
    """The least that a group takes."""
    return max(float(build.received_bytes), build.moved_bytes / senders if _alone(build) else 0.0)


def _alone(build: Build) -> bool:
    """Whether it makes one unit. Several may also be made one by one, for less at a time and with less room."""
    return len(build.goals) == 1


def _doubling(local: LocalDAG) -> float:
    """While a new replica is received, as many others can be as there are devices to send: devices at most double.

    Units of fewer devices than one replica take longer, and may each feed one meanwhile.
    """
    fresh = [build for build in local.builds if not build.sources]
    received = min((build.received_bytes for build in fresh), default=0)
    if not received:
        return 0.0
    size = min(len(build.acquires) for build in fresh)
    units = [*local.kept, *local.left, *(goal for build in local.builds for goal in build.goals)]
    senders = sum(unit.layout.size for unit in (*local.kept, *local.left))
    senders += sum(len(build.acquires) for build in local.builds if build.sources)
    wanted = senders + len(fresh) * size
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


def _releasing(locals_: Sequence[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int]) -> float:
    """A group that needs all units of a model-stage to leave waits until that has its first new one."""
    waits: set[tuple[ModelStage, float, int, frozenset[ModelStage]]] = set()
    """Model-stage, how long a group takes at least as the first and at all, and what it waits for."""
    on = _leaving(locals_, _crowded(locals_, used, capacity))
    left = {local.model_stage: len(local.left) for local in locals_ if not local.kept and not local.elsewhere}
    for local in locals_:
        senders = sum(unit.layout.size for unit in (*local.kept, *local.left))
        for build in local.builds:
            waited = _waited(build, on, used, capacity) if on and _alone(build) else {}
            stages = frozenset(ms for ms, units in waited.items() if len(units) == left.get(ms))
            first = _lasts(build, senders)
            waits.add((local.model_stage, first, build.received_bytes, stages))
    copied: dict[ModelStage, float] = {}
    found = 0.0
    for _ in range(len(locals_) + 1):
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
