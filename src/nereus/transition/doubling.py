"""How long new replicas take to be made at least: who holds a model-stage, and who has to give it up before others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd

from nereus.core import EMU
from nereus.transition.demand import Demand, Stage
from nereus.transition.growth import ROUNDING, Gate, Growth, Swap, least_rounds
from nereus.transition.releasing import Releases


@dataclass(frozen=True, slots=True)
class _Making:
    """A model-stage's demands that read nothing on their devices, the `fresh`, and the least that one receives.

    `settled`: device of the other demands → copies; what these read in place is taken to hold it from the start on.
    """

    stage: Stage
    fresh: Sequence[Demand]
    round_bytes: int
    settled: Mapping[int, int]

    def holding(self, unit: EMU) -> int:
        """Devices that hold the model-stage no longer once `unit` has left."""
        return sum(device not in self.settled for device in unit.devices)

    def own(self, demand: Demand) -> list[EMU]:
        """Units of this model-stage that have to leave before."""
        return [unit for unit in demand.gone if unit.model_stage == self.stage.model_stage]


def doubled_bytes(stages: Sequence[Stage], releases: Releases) -> float:
    """The least span in which all new replicas are made."""
    return max((_span(making, stages, releases) for stage in stages if (making := _making(stage))), default=0.0)


def _making(stage: Stage) -> _Making | None:
    tied = {id(each.build) for each in stage.demands if not (each.alone or each.fresh)}
    fresh = [each for each in stage.demands if each.fresh and each.moved_bytes and id(each.build) not in tied]
    if not fresh:
        return None
    ids = set(map(id, fresh))
    settled = {device: each.copies for each in stage.demands if id(each) not in ids for device in each.goal.devices}
    return _Making(stage, fresh, min(each.received_bytes for each in fresh), settled)


def _span(making: _Making, stages: Sequence[Stage], releases: Releases) -> float:
    """While a new replica is received, as many others can be as there are devices to send: devices at most double.

    Units of fewer devices than one replica take longer, and may each feed one meanwhile.
    """
    stage, fresh, round_bytes = making.stage, making.fresh, making.round_bytes
    old = {device for unit in stage.old for device in unit.devices}
    held = stage.holding + sum(copies for device, copies in making.settled.items() if device not in old)
    wanted = sum(each.copies * each.goal.layout.size for each in fresh)
    sizes = {unit.layout.size for unit in stage.old} | {each.goal.layout.size for each in stage.demands}
    if min(sizes) < max(each.goal.layout.size for each in fresh):
        first = max(1.0, min(each.moved_bytes for each in fresh) / held / round_bytes)
        growth = round_bytes * max(each.goal.layout.size / each.moved_bytes for each in fresh)
        return round_bytes * least_rounds((held + wanted) / held, growth, first)
    # What tied groups send may be a little less than the most for each device; such a round leaves less over.
    even = min((each.moved_bytes // each.goal.layout.size for each in fresh if not each.alone), default=round_bytes)
    makings = [replace(making, round_bytes=size) for size in {round_bytes, min(round_bytes, even)}]
    return max(_doubled(each, held, wanted, gcd(*sizes), stages, releases) for each in makings)


def _doubled(making: _Making, held: int, wanted: int, step: int, stages: Sequence[Stage], releases: Releases) -> float:
    """Where no unit is smaller than a replica: by the devices of the swaps, and by what each other stage waits for."""
    swap_of = _swaps(making, step)
    swaps = Counter[Swap]()
    for swap, copies in {id(swap): (swap, copies) for swap, copies in swap_of.values()}.values():
        swaps[swap] += copies
    tied = Counter[int]()
    for each in making.fresh:
        tied[id(each.build)] += 0 if each.alone else each.goal.layout.size
    whole = not making.settled and max(tied.values()) <= min(unit.layout.size for unit in making.stage.old)
    growth = Growth(held, wanted, swaps, whole)
    found = max(growth.rounds(Gate()), _before_tail(making, growth, releases))
    for other in stages if any(each.gone for each in making.fresh) else ():
        gates = _gates(making, other, releases, {unit: swap for unit, (swap, _) in swap_of.items()})
        found = max(found, min(map(growth.rounds, gates), default=0.0))
    return making.round_bytes * found


def _before_tail(making: _Making, growth: Growth, releases: Releases) -> float:
    """Once all old units have left, only new ones are read, and the tail of the last one is yet to come."""
    tail = releases.tails.get(making.stage.model_stage, 0.0) / making.round_bytes
    beside = sum(making.settled.values()) + sum(swap.spare * count for swap, count in growth.swaps.items())
    enough = growth.wanted
    for _ in range(ceil(tail - ROUNDING)):
        enough = max(0, -(-(enough - beside) // 2))
    return growth.rounds(Gate(), enough) + tail if tail and enough else 0.0


def _swaps(making: _Making, step: int) -> dict[EMU, tuple[Swap, int]]:
    """Own unit that has to leave → the swap it is of, and its copies. Senders come in multiples of `step` devices."""
    found: dict[EMU, tuple[Swap, int]] = {}
    for units, demands in _joined(making):
        held = min(sum(map(making.holding, making.own(each))) for each in demands)
        wanted = sum(each.goal.layout.size for each in demands)
        tied: dict[int, list[Demand]] = defaultdict(list)
        for each in demands:
            if not each.alone:
                tied[id(each.build)].append(each)
        swap = Swap(held, wanted, sum(_spare(each, making.round_bytes, step) for each in tied.values()))
        found.update(dict.fromkeys(units, (swap, demands[0].copies)))
    return found


def _joined(making: _Making) -> Iterator[tuple[set[EMU], list[Demand]]]:
    """Demands that wait for units in common, with these."""
    found: list[tuple[set[EMU], list[Demand]]] = []
    place: dict[EMU, int] = {}
    for demand in making.fresh:
        units = making.own(demand)
        if not units:
            continue
        joined = sorted({place[unit] for unit in units if unit in place})
        home = joined[0] if joined else len(found)
        if not joined:
            found.append((set(), []))
        for other in joined[1:]:
            found[home][0].update(found[other][0])
            found[home][1].extend(found[other][1])
            found[other] = (set(), [])
        found[home][0].update(units)
        found[home][1].append(demand)
        place.update(dict.fromkeys(found[home][0], home))
    return (each for each in found if each[1])


def _spare(tied: Sequence[Demand], round_bytes: int, step: int) -> int:
    """The most devices by which groups of these have more than those that send, in each of the rounds they last.

    k devices take μ / k rounds to send μ rounds, so that whole rounds of them pass for more than μ / 2 devices.
    """
    devices, moved = sum(each.goal.layout.size for each in tied), sum(each.moved_bytes for each in tied)
    return step * max(0, -(-(2 * devices * round_bytes - moved) // (2 * round_bytes * step)) - 1)


def _gates(making: _Making, other: Stage, releases: Releases, swap_of: Mapping[EMU, Swap]) -> Collection[Gate]:
    """What a model-stage all of whose units leave makes this one wait for: one of these, by what it has first."""
    if other.model_stage == making.stage.model_stage or other.model_stage not in releases.tails:
        return ()
    waiting = Counter[EMU]()
    for each in making.fresh:
        for unit in each.gone if not making.own(each) else ():  # those of swaps wait anyway
            waiting[unit] += each.goal.layout.size
    late = min(waiting[unit] for local in other.parts for unit in local.left)
    found: dict[Gate, None] = {}
    for each in other.demands:
        gone = [unit for unit in each.gone if unit.model_stage == making.stage.model_stage]
        if not (gone or late):
            return ()
        opened = {id(swap): swap for unit in gone if (swap := swap_of.get(unit))}
        after = (each.lasts(other.holding) + releases.tails[other.model_stage]) / making.round_bytes
        earliest = releases.copied[other.model_stage] / making.round_bytes
        found[Gate(earliest, late, after, sum(map(making.holding, gone)), tuple(opened.values()))] = None
    return found
