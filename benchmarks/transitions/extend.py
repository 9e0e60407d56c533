"""Extend of a TP2 unit to two more devices: against one packed broadcast a pair and torchft's in-place transport."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.planner._result import Result
from benchmarks.transitions._others import (
    BROADCAST,
    OURS,
    PACKED,
    TORCHFT,
    described,
    payload,
    slower_at_most,
)
from benchmarks.transitions.scenario import Scenario, units
from benchmarks.transitions.sides import Measured, compare
from benchmarks.transitions.state import SIZES

RUNS = 7


def run(quick: bool = False) -> list[Result]:
    """All sides in one round."""
    scenario = Scenario("Extend TP2", SIZES["tiny" if quick else "full"], units(2, 1, 1), units(2, 1, 2))
    sides = (*OURS, BROADCAST, PACKED, TORCHFT)
    return lines(compare(sides[:1] if quick else sides, scenario, 1 if quick else RUNS), scenario)


def lines(found: Mapping[str, Measured], scenario: Scenario) -> list[Result]:
    """Ours against each other way, where both ran."""
    others = [other for other in (BROADCAST, PACKED, TORCHFT) if other.name in found]
    mine = [side for side in OURS if side.name in found]
    return [
        *described(found, scenario.minimum_bytes),
        *(slower_at_most(1.15, ours, other, found) for ours in mine for other in others),
        *payload(1.02, mine, found, scenario.minimum_bytes),
    ]
