"""Changing TP and PP (the paper's Figure 12, on this machine): by number of workers and by size of the state."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks._result import Result
from benchmarks.transitions._others import DCP, EXECUTOR, LIBRARY, MEGATRON, REFIT, TENPLEX
from benchmarks.transitions._series import setting, shown
from benchmarks.transitions.scenario import Scenario, units
from benchmarks.transitions.state import SIZES, Size

RUNS = 3
LAYOUTS = {2: ((2, 1), (1, 2)), 4: ((2, 2), (4, 1)), 8: ((4, 2), (2, 4))}
"""Workers → two layouts, both ways between them."""
STATE, STATES = "half", ("sixth", "quarter", "half", "full")
"""Of the settings that differ in workers; of those that differ in bytes, all on four workers."""


def run(quick: bool = False) -> list[Result]:
    """Each number is the mean of the way there and the way back."""
    sides = (EXECUTOR, LIBRARY, REFIT, DCP, MEGATRON, TENPLEX)
    if quick:
        return setting("2 workers", _both_ways(2, SIZES["tiny"]), sides[:1], 1)
    lines: list[Result] = []
    for workers in LAYOUTS:
        size = SIZES[STATE]
        lines += setting(f"{workers} workers, {size.bytes / 1e6:.0f} MB", _both_ways(workers, size), sides, RUNS)
    for name in STATES:
        if name != STATE:  # that is the row of four workers
            size = SIZES[name]
            lines += setting(f"4 workers, {size.bytes / 1e6:.0f} MB", _both_ways(4, size), sides, RUNS)
    return lines


def tables(lines: Sequence[Result]) -> list[Table]:
    """One table; the paper draws two panels."""
    return [shown("Cost (s) of changing TP and PP; checkpoints also persist state", lines)]


def _both_ways(workers: int, size: Size) -> list[Scenario]:
    one, other = LAYOUTS[workers]
    pairs = ((one, other), (other, one))
    return [Scenario(f"TP{a[0]},PP{a[1]} -> TP{b[0]},PP{b[1]}", size, units(*a, 1), units(*b, 1)) for a, b in pairs]
