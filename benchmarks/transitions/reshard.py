"""TP2,PP2 → TP4 on the same four processes, ours and every other way, and what memory it takes beside the target."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks._result import Result
from benchmarks.transitions._others import (
    DCP,
    DEEPSPEED,
    DIRECT,
    EXECUTOR,
    EXECUTOR_SENT,
    LIBRARY,
    LIBRARY_SENT,
    MEGATRON,
    OURS,
    REFIT,
    RESTART,
    TENPLEX,
    described,
    faster_at_least,
    payload,
    slower_at_most,
)
from benchmarks.transitions.scenario import Scenario, units
from benchmarks.transitions.sides import Measured, compare
from benchmarks.transitions.state import SIZES

RUNS = 5
BOTH = (*OURS, EXECUTOR_SENT, LIBRARY_SENT)
BUCKET_BYTES = 64 << 20


def run(quick: bool = False) -> list[Result]:
    """Fast sides in one round, those that take seconds in another with ours among them again."""
    scenario = Scenario("TP2,PP2 -> TP4", SIZES["tiny" if quick else "full"], units(2, 2, 1), units(4, 1, 1))
    if quick:
        return lines(compare((EXECUTOR, EXECUTOR_SENT, DIRECT), scenario, 1), scenario)
    fast = compare((*BOTH, DIRECT, REFIT, DCP), scenario, RUNS + 2)
    slow = compare((EXECUTOR, MEGATRON, DEEPSPEED, TENPLEX, RESTART), scenario, RUNS)
    compared = [
        *(faster_at_least(1.25, ours, REFIT, fast) for ours in (EXECUTOR, EXECUTOR_SENT)),
        *(faster_at_least(3, ours, DCP, fast) for ours in (EXECUTOR, EXECUTOR_SENT)),
        faster_at_least(6, EXECUTOR, MEGATRON, slow),
        faster_at_least(20, EXECUTOR, DEEPSPEED, slow),
        faster_at_least(15, EXECUTOR, TENPLEX, slow),
    ]
    beside = {f"{name} (among the slow)" if name in fast else name: each for name, each in slow.items()}
    return [*lines(fast, scenario), *compared, *described(beside, scenario.minimum_bytes)]


def lines(found: Mapping[str, Measured], scenario: Scenario) -> list[Result]:
    """Against the direct exchange; bytes; memory."""
    mine = [side for side in BOTH if side.name in found]
    return [
        *described(found, scenario.minimum_bytes),
        *(slower_at_most(1.2, ours, DIRECT, found) for ours in mine),
        *payload(1.02, mine, found, scenario.minimum_bytes),
        *memory(found, scenario),
    ]


def memory(found: Mapping[str, Measured], scenario: Scenario) -> list[Result]:
    """The device that took most beside its target share: pages of its process, and what the ledger counted."""
    placed, size = scenario.placed, scenario.size
    share = {device: placed.stored_bytes(size, device) for unit in placed.devices for device in unit}
    results = []
    for name, key in (
        (EXECUTOR.name, "extra_bytes"),
        (EXECUTOR.name, "ledger_extra_bytes"),
        (LIBRARY.name, "extra_bytes"),
    ):
        if name in found and (extra := found[name].last(key)):
            beside = max(extra[device] - share[device] for device in share)
            met = beside <= 2 * BUCKET_BYTES
            what = "ledger" if key.startswith("ledger") else "resident pages"
            notes = f"most of {max(extra):,} bytes, target share {max(share.values()):,}"
            line = Result(
                f"{name}: memory beside the target share, MB ({what})", "<= 134.2", beside / 1e6, met=met, notes=notes
            )
            results.append(line)
    return results
