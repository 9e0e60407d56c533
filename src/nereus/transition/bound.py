"""What no order can beat, in the model of a run: a lower bound of its span."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil, log2

from nereus.transition.decompose import Build, LocalDAG


def bound_bytes(locals_: Sequence[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int]) -> float:
    """The largest of: what one device has to receive in all, new replicas that double, and waits for releases."""
    device_bytes: dict[int, int] = defaultdict(int)
    for local in locals_:
        for build in local.builds:
            if build.received_bytes:
                for device in build.acquires:
                    device_bytes[device] += build.received_bytes
    return max(
        max(device_bytes.values(), default=0),
        max((_doubling(local) for local in locals_), default=0.0),
        _releasing(locals_, used, capacity) if capacity else 0.0,
    )


def least(build: Build, local: LocalDAG) -> float:
    """A group takes at least as long as a device receives, and as all that could send to it need."""
    senders = [unit.layout.size for unit in (*local.kept, *local.left, *(g for b in local.builds for g in b.goals))]
    return max(float(build.received_bytes), build.moved_bytes / sum(senders))


def _doubling(local: LocalDAG) -> float:
    """Each whole unit serves one new replica at a time, so the copies at most double in the time of one."""
    fresh = [build for build in local.builds if not build.sources]
    if not fresh:
        return 0.0
    copies = len(local.kept) + len(local.left) + sum(len(b.goals) for b in local.builds if b.sources)
    rounds = ceil(log2((copies + len(fresh)) / copies) - 1e-9)
    return min(build.received_bytes for build in fresh) * rounds


def _releasing(locals_: Sequence[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int]) -> float:
    """A group that needs a unit to leave waits until there is another copy of that unit's model-stage."""
    goes: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for local in locals_:
        alone = len(local.kept) + len(local.left) == 1
        earliest = min((float(build.received_bytes) for build in local.builds), default=0.0) if alone else 0.0
        for unit in local.left:
            for device, size in zip(unit.devices, local.pricing.stored(unit.layout), strict=True):
                goes[device].append((earliest, size))
    found = 0.0
    for build in (build for local in locals_ for build in local.builds):
        start = 0.0
        for device, wanted in build.acquires.items():
            over = used.get(device, 0) + wanted - capacity.get(device, used.get(device, 0) + wanted)
            for earliest, size in sorted(goes[device]) if over > 0 and device in goes else ():
                if over <= 0:
                    break
                over -= size
                start = max(start, earliest)
        found = max(found, start + build.received_bytes)
    return found
