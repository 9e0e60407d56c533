"""Changing TP and PP (the paper's Figure 12, on this machine): by number of workers and by size of the state."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks._result import Result
from benchmarks.transitions._others import DCP, EXECUTOR, LIBRARY, MEGATRON, REFIT, TENPLEX
from benchmarks.transitions._series import setting, shown
from benchmarks.transitions.scenario import Scenario, units
from benchmarks.transitions.state import SIZES, Size

RUNS = 5
LAYOUTS = {2: ((2, 1), (1, 2)), 4: ((2, 2), (4, 1)), 8: ((4, 2), (2, 4))}
"""Workers → TP and PP before and after."""
STATE, STATES = "half", ("sixth", "quarter", "half", "full")
"""Of the settings that differ in workers; of those that differ in bytes, all on four workers."""


def run(quick: bool = False) -> list[Result]:
    """Each number is the median of the runs of one setting."""
    sides = (EXECUTOR, LIBRARY, REFIT, DCP, MEGATRON, TENPLEX)
    if quick:
        return setting("2 workers", _scenario(2, SIZES["tiny"]), sides[:1], 1)
    lines: list[Result] = []
    for workers in LAYOUTS:
        size = SIZES[STATE]
        lines += setting(f"{workers} workers, {size.bytes / 1e6:.0f} MB", _scenario(workers, size), sides, RUNS)
    for name in STATES:
        if name != STATE:  # that is the row of four workers
            size = SIZES[name]
            lines += setting(f"4 workers, {size.bytes / 1e6:.0f} MB", _scenario(4, size), sides, RUNS)
    return lines


def tables(lines: Sequence[Result]) -> list[Table]:
    """One table; the paper draws two panels."""
    return [shown("Cost (s) of changing TP and PP; checkpoints also persist state", lines)]


def _scenario(workers: int, size: Size) -> Scenario:
    before, after = LAYOUTS[workers]
    name = f"TP{before[0]},PP{before[1]} -> TP{after[0]},PP{after[1]}"
    return Scenario(name, size, units(*before, 1), units(*after, 1))
