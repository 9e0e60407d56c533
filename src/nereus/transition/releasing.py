"""How long releases make groups wait at least: the last old unit of a model-stage leaves when it has its first new one.

A goal unit needs those units to leave without which its devices have no room for it, whatever else leaves. If one of
them is what it would read in place, it receives more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nereus.core import EMU, ModelStage
from nereus.transition.decompose import Build, LocalDAG
from nereus.transition.occupancy import alone, holding, lasts

On = Mapping[int, Sequence[tuple[EMU, int]]]
"""Device that could be short of room → units on it that go, and their bytes there."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """A goal unit: how long it takes at least, as the first of its model-stage and at all, and what leaves before.

    `whole` are the model-stages whose units all have to.
    """

    model_stage: ModelStage
    first: float
    received: float
    units: frozenset[EMU]
    whole: frozenset[ModelStage]


def released_bytes(stages: Sequence[Sequence[LocalDAG]], used: Mapping[int, int], capacity: Mapping[int, int]) -> float:
    """The least span in which all groups find room."""
    parts = [local for own in stages for local in own]
    on = _leaving(parts, _crowded(parts, used, capacity))
    going = {
        own[0].model_stage: [(unit, local.copies) for local in own for unit in local.left]
        for own in stages
        if not any(local.kept or local.elsewhere for local in own)
    }
    counts = {ms: sum(copies for _, copies in units) for ms, units in going.items()}
    waits = {wait for own in stages for wait in _waits(own, on, used, capacity, counts)}
    copied: dict[ModelStage, float] = {}
    """When each model-stage has its first new unit, at the earliest."""
    found = 0.0
    for _ in range(len(stages) + 1):
        ends: dict[ModelStage, float] = {}
        for wait in waits:
            start = max((copied.get(other, 0.0) for other in wait.whole), default=0.0)
            ends[wait.model_stage] = min(start + wait.first, ends.get(wait.model_stage, start + wait.first))
            found = max(found, start + wait.received)
        copied = ends
    after = _longest(waits)
    for ms, units in going.items():
        if ms in copied and units:  # whichever of its units is the last to leave, what needs that room comes after
            found = max(found, copied[ms] + min(after.get(unit, 0.0) for unit, _ in units))
    return max(found, max(copied.values(), default=0.0))


def _waits(
    own: Sequence[LocalDAG],
    on: On,
    used: Mapping[int, int],
    capacity: Mapping[int, int],
    counts: Mapping[ModelStage, int],
) -> Iterator[_Wait]:
    senders = holding(own)
    for local in own:
        for build in local.builds:
            crowded = not on.keys().isdisjoint(build.acquires) if on else False
            if alone(build) and not crowded:
                times = (lasts(build, senders), float(build.received_bytes))
                yield _Wait(local.model_stage, *times, frozenset(), frozenset())
                continue
            for goal in build.goals:
                units = frozenset(_needed(goal, build, on, used, capacity))
                whole = frozenset(
                    ms for ms, count in counts.items() if sum(unit.model_stage == ms for unit in units) == count
                )
                yield _Wait(local.model_stage, *_times(local, build, senders, goal, units), units, whole)


def _times(local: LocalDAG, build: Build, senders: int, goal: EMU, gone: Collection[EMU]) -> tuple[float, float]:
    """The least that `goal` takes as the first of its model-stage and at all, without the units `gone` to read."""
    held = {device for unit in build.sources if unit not in gone for device in unit.devices}
    price = local.pricing.price(goal, held)
    received = float(price.received_bytes)
    return max(received, price.moved_bytes / senders if alone(build) else 0.0), received


def _longest(waits: Collection[_Wait]) -> dict[EMU, float]:
    """Unit → the longest of what needs it to leave."""
    found: dict[EMU, float] = defaultdict(float)
    for wait in waits:
        for unit in wait.units:
            found[unit] = max(found[unit], wait.received)
    return found


def _crowded(parts: Sequence[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int]) -> set[int]:
    """Devices where some group has no room before anything leaves."""
    return {
        device
        for local in parts
        for build in local.builds
        for device, wanted in build.acquires.items()
        if device in capacity and used.get(device, 0) + wanted > capacity[device]
    }


def _leaving(parts: Sequence[LocalDAG], crowded: Collection[int]) -> dict[int, list[tuple[EMU, int]]]:
    """Device of `crowded` → units on it that go, and their bytes there."""
    found: dict[int, list[tuple[EMU, int]]] = defaultdict(list)
    for local in parts:
        for unit in local.left if crowded else ():
            for device, size in zip(unit.devices, local.pricing.stored(unit.layout), strict=True):
                if device in crowded:
                    found[device].append((unit, size))
    return found


def _needed(goal: EMU, build: Build, on: On, used: Mapping[int, int], capacity: Mapping[int, int]) -> Iterator[EMU]:
    """Units that have to leave before `goal` has room."""
    for device in goal.devices:
        if device in on and (over := used.get(device, 0) + build.acquires[device] - capacity[device]) > 0:
            most = sum(size for _, size in on[device])
            yield from (unit for unit, size in on[device] if most - size < over)
