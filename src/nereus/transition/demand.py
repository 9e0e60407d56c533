"""What goal units need at least, whatever the order: bytes they receive, and units that have to leave before.

A unit has to leave if the devices of the goal unit have no room beside it, whatever else leaves. If it is what would be
read in place, more is received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nereus.core import EMU, ModelStage
from nereus.transition.decompose import Build, LocalDAG

Going = Mapping[int, Sequence[tuple[EMU, int]]]
"""Device where room could be short → units on it that go, and their bytes there."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One goal unit. `received_bytes` and `moved_bytes` as in `Price`; `fresh`: nothing on its devices can be read.

    It is `alone` if no other has to be built with it in the group `build`, and stands for `copies` that are alike.
    """

    goal: EMU
    received_bytes: int
    moved_bytes: int
    fresh: bool
    alone: bool
    gone: frozenset[EMU]
    build: Build
    copies: int

    def lasts(self, senders: int) -> float:
        """The least that building it takes, of at most so many senders.

        What is built with others may also be built by itself, and then moves less.
        """
        return max(float(self.received_bytes), self.moved_bytes / senders if self.alone else 0.0)


@dataclass(frozen=True, slots=True)
class Stage:
    """One model-stage: its parts, which share no device, and what its goal units need."""

    parts: Sequence[LocalDAG]
    demands: Sequence[Demand]

    @property
    def model_stage(self) -> ModelStage:
        """Its name."""
        return self.parts[0].model_stage

    @property
    def builds(self) -> Iterator[Build]:
        """The groups of all parts, one of each that is alike."""
        return (build for local in self.parts for build in local.builds)

    @property
    def old(self) -> Iterator[EMU]:
        """The units of the start, one of each that is alike."""
        return (unit for local in self.parts for unit in (*local.kept, *local.left))

    @property
    def holding(self) -> int:
        """Devices that hold a unit at the start, copies included."""
        return sum(local.copies * unit.layout.size for local in self.parts for unit in (*local.kept, *local.left))

    def building(self) -> int:
        """Devices that units are built on, copies included."""
        return sum(local.copies * sum(len(build.acquires) for build in local.builds) for local in self.parts)


def stages_of(locals_: Iterable[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int]) -> tuple[Stage, ...]:
    """All model-stages, from what is `used` at the start by device."""
    parts: dict[ModelStage, list[LocalDAG]] = {}
    for local in locals_:
        parts.setdefault(local.model_stage, []).append(local)
    over = _short([local for own in parts.values() for local in own], used, capacity)
    going = _going([local for own in parts.values() for local in own], over)
    return tuple(
        Stage(
            own, [demand for local in own for build in local.builds for demand in _demands(local, build, over, going)]
        )
        for own in parts.values()
    )


def _demands(local: LocalDAG, build: Build, over: Mapping[int, int], going: Going) -> Iterator[Demand]:
    alone = len(build.goals) == 1
    if alone and (not over or over.keys().isdisjoint(build.acquires)):
        sizes = (build.received_bytes, build.moved_bytes)
        yield Demand(build.goals[0], *sizes, not build.sources, alone, frozenset(), build, local.copies)
        return
    for goal in build.goals:
        gone = frozenset(_gone(goal, build, over, going))
        held = {device for unit in build.sources if unit not in gone for device in unit.devices}
        price = local.pricing.price(goal, held)
        fresh = held.isdisjoint(goal.devices)
        yield Demand(goal, price.received_bytes, price.moved_bytes, fresh, alone, gone, build, local.copies)


def _short(parts: Iterable[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int]) -> dict[int, int]:
    """Device where some group has no room before anything leaves → bytes in use less its capacity."""
    return {
        device: level
        for local in parts
        for build in (local.builds if capacity else ())
        for device, wanted in build.acquires.items()
        if device in capacity and (level := used.get(device, 0) - capacity[device]) + wanted > 0
    }


def _going(parts: Iterable[LocalDAG], devices: Collection[int]) -> dict[int, list[tuple[EMU, int]]]:
    found: dict[int, list[tuple[EMU, int]]] = defaultdict(list)
    for local in parts if devices else ():
        for unit in local.left:
            for device, size in zip(unit.devices, local.pricing.stored(unit.layout), strict=True):
                if device in devices:
                    found[device].append((unit, size))
    return found


def _gone(goal: EMU, build: Build, over: Mapping[int, int], going: Going) -> Iterator[EMU]:
    """Units that have to leave before `goal` has room."""
    for device in goal.devices:
        if device in over and (short := over[device] + build.acquires[device]) > 0:
            most = sum(size for _, size in going.get(device, ()))
            yield from (unit for unit, size in going.get(device, ()) if most - size < short)
