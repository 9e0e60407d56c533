"""Extend of a TP2 unit to two more devices: against one packed broadcast a pair and torchft's in-place transport.

First use of fresh memory costs more than the wire here, so like stands against like: what receives into memory that is
there already (a model that is built) against the same, what allocates and packs inside the clock against the same. The
executor against the ready ones is printed too: it always allocates.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks._result import Result
from benchmarks.transitions._others import (
    BROADCAST,
    EXECUTOR,
    EXECUTOR_SENT,
    IN_PLACE,
    IN_PLACE_SENT,
    LIBRARY,
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
    sides = (EXECUTOR, LIBRARY, EXECUTOR_SENT, PACKED, IN_PLACE, IN_PLACE_SENT, BROADCAST, TORCHFT)
    return lines(compare(sides[:1] if quick else sides, scenario, 1 if quick else RUNS), scenario)


def lines(found: Mapping[str, Measured], scenario: Scenario) -> list[Result]:
    """Ours against each other way, where both ran."""
    mine = [side for side in (EXECUTOR, LIBRARY, EXECUTOR_SENT, IN_PLACE, IN_PLACE_SENT) if side.name in found]
    ready, fresh = (BROADCAST, TORCHFT), (PACKED,)
    alike = [(EXECUTOR, fresh), (LIBRARY, fresh), (EXECUTOR_SENT, fresh), (IN_PLACE, ready), (IN_PLACE_SENT, ready)]
    pairs = [*alike, (EXECUTOR, ready)]
    return [
        *described(found, scenario.minimum_bytes),
        *(slower_at_most(1.15, a, b, found) for a, others in pairs for b in others if {a.name, b.name} <= found.keys()),
        *payload(1.02, mine, found, scenario.minimum_bytes),
    ]
