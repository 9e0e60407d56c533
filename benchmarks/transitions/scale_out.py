"""DP1 → DP8: a source that serves one new replica after another on one side, replicas that forward on ours."""

from __future__ import annotations

from math import ceil, log2

from benchmarks._result import Result
from benchmarks.transitions._others import (
    EXECUTOR,
    EXECUTOR_SENT,
    LIBRARY,
    SEQUENTIAL,
    described,
    payload,
    slower_at_most,
)
from benchmarks.transitions.scenario import Scenario, units
from benchmarks.transitions.sides import compare, free_bytes
from benchmarks.transitions.state import SIZES

RUNS, REPLICAS = 5, 8


def run(quick: bool = False) -> list[Result]:
    """The state is smaller where memory is short: eight copies of it stand at once."""
    fits = 16 * SIZES["full"].bytes < free_bytes()
    size = SIZES["tiny" if quick else "full" if fits else "quarter"]
    scenario = Scenario(f"DP1 -> DP{REPLICAS}", size, units(1, 1, 1), units(1, 1, REPLICAS))
    sides = (EXECUTOR, LIBRARY, EXECUTOR_SENT, SEQUENTIAL)
    found = compare(sides[: 1 if quick else 4], scenario, 1 if quick else RUNS)
    lines = described(found, scenario.minimum_bytes)
    if not quick:
        lines += [slower_at_most(0.8, ours, SEQUENTIAL, found) for ours in sides[:3]]
    sent = found[EXECUTOR.name].last("sent_bytes")
    if sent:
        copies, limit = max(sent.values()) / size.bytes, ceil(log2(REPLICAS))
        notes = "copies of the whole state that the busiest device sent: " + ", ".join(
            f"{device}: {count / size.bytes:.2f}"
            for device, count in sorted(sent.items(), key=lambda each: int(each[0]))
        )
        lines.append(Result("executor: sends of one source", f"<= {limit}", copies, met=copies <= limit, notes=notes))
    return [*lines, *payload(1.02, (EXECUTOR,), found, scenario.minimum_bytes)]
