"""Doubling the workers of one model-stage (the paper's Table 4, on this machine): 1 → 2, 2 → 4, 4 → 8 replicas."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks._result import Result
from benchmarks.transitions._others import BROADCAST, DCP, DEEPSPEED, EXECUTOR, LIBRARY, MEGATRON, TENPLEX, TORCHFT
from benchmarks.transitions._series import setting, shown
from benchmarks.transitions.scenario import Scenario, units
from benchmarks.transitions.state import SIZES

RUNS = 5


def run(quick: bool = False) -> list[Result]:
    """Eight copies of the state stand at once, and every side holds its sources: the state is a third of the usual."""
    size = SIZES["tiny" if quick else "quarter"]
    sides = (EXECUTOR, LIBRARY, BROADCAST, TORCHFT, DCP, MEGATRON, TENPLEX, DEEPSPEED)
    lines: list[Result] = []
    for workers in (1,) if quick else (1, 2, 4):
        scenario = Scenario(f"DP{workers} -> DP{2 * workers}", size, units(1, 1, workers), units(1, 1, 2 * workers))
        name = f"{workers}→{2 * workers}"
        lines += setting(name, scenario, sides[:1] if quick else sides, 1 if quick else RUNS)
    return lines


def tables(lines: Sequence[Result]) -> list[Table]:
    """As the paper prints it."""
    return [shown("Cost (s) of doubling the workers; checkpoints also persist state", lines)]
