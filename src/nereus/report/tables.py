"""What the planner found, for a terminal: the plan, what its step waits for, memory, runners-up, what was refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nereus.core import Assignment, Rejection
from nereus.core.sizes import show_bytes
from nereus.planning.judge import Scored
from nereus.planning.problem import Problem
from nereus.planning.search import SearchResult

RUNNERS_UP, EXAMPLES = 4, 3
"""How many runners-up are shown, and how many examples of each reason of refusal."""


def plan(problem: Problem, result: SearchResult) -> RenderableType:
    """The fastest plan and everything that explains it."""
    best = result.best[0]
    return Group(
        _assignments(problem, best),
        *map(Text, _facts(problem, result)),
        Text(),
        _runners_up(result),
        Text(),
        _refused(result.refused),
    )


def _assignments(problem: Problem, best: Scored) -> Table:
    table = Table("model-stage", "tp", "pp", "dp", "micro-batch", "recompute", "devices", "seconds", "memory")
    for model_stage in best.plan.model_stages:
        assignment = best.plan.of(model_stage)
        chosen = assignment.candidate
        calls = problem.workflow.calls_of(model_stage)
        table.add_row(
            str(model_stage),
            str(chosen.layout.tp),
            str(chosen.layout.pp),
            str(chosen.dp),
            str(chosen.micro_batch),
            chosen.recompute,
            _units(assignment),
            "\n".join(f"{call.name} {best.estimate.call_s[call.name]:.3g}" for call in calls),
            show_bytes(max(best.estimate.peak_bytes[device] for device in assignment.devices)),
        )
    return table


def _units(assignment: Assignment) -> str:
    return " ".join("[" + ",".join(map(str, unit)) + "]" for unit in assignment.units)


def _facts(problem: Problem, result: SearchResult) -> Iterator[str]:
    best = result.best[0].estimate
    path = " → ".join(f"{call} {best.call_s[call]:.3g} s" for call in best.critical_path)
    yield f"predicted step: {best.step_s:.3g} s (± {best.uncertainty:.0%}), {result.considered} whole plans compared"
    yield f"critical path: {path}"
    yield f"limited by: {max(best.critical_path, key=lambda call: best.call_s[call])}"
    fullest = max(best.peak_bytes, key=lambda d: best.peak_bytes[d] / problem.cluster.kind(d).memory_bytes)
    capacity = problem.cluster.kind(fullest).memory_bytes
    yield (
        f"fullest device: {fullest} with {show_bytes(best.peak_bytes[fullest])} of {show_bytes(capacity)} "
        f"({best.limits[fullest]})"
    )


def _runners_up(result: SearchResult) -> Table:
    fastest_s = result.best[0].estimate.step_s
    table = Table("runners-up", "step s", "slower by")
    for scored in result.best[1 : 1 + RUNNERS_UP]:
        step_s = scored.estimate.step_s
        table.add_row(scored.plan.describe().replace("; ", "\n"), f"{step_s:.3g}", f"{step_s / fastest_s - 1:.1%}")
    return table


def _refused(refused: Sequence[Rejection]) -> Table:
    """One row a reason, with how many were refused for it and a few of them."""
    table = Table("refused", "number", "for example")
    for reason, names in grouped(refused).items():
        table.add_row(reason, str(len(names)), ", ".join(names[:EXAMPLES]))
    return table


def grouped(refused: Sequence[Rejection]) -> dict[str, list[str]]:
    """Reason → what was refused for it."""
    found: dict[str, list[str]] = defaultdict(list)
    for rejection in refused:
        found[rejection.reason].append(rejection.plan)
    return dict(found)
