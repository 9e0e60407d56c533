"""Tables for a terminal: a plan that explains itself (D7.7)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypedDict

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from nereus.controller.changes import changes
from nereus.core import Estimate, Plan, Rejection
from nereus.core.sizes import show_bytes
from nereus.planning.judge import Scored
from nereus.planning.problem import Problem
from nereus.planning.search import SearchResult

EXAMPLES = 3
"""Refused candidates that are named for each reason; the others are counted."""


def plan(problem: Problem, result: SearchResult) -> RenderableType:
    """The fastest plan: layouts, the step by call, memory by device; which plans came close; what was refused."""
    best, *others = result.best
    parts: list[RenderableType] = [
        _layouts(best.plan),
        f"predicted step {best.estimate.step_s:.3g} s, give or take {best.estimate.uncertainty:.0%}; "
        f"{result.considered} plans compared, none of them below {result.bound_s:.3g} s",
        _calls(best.estimate),
        _memory(problem, best.estimate),
    ]
    if others:
        parts.append(_runners_up(best, others))
    if result.refused:
        parts.append(_refused(result.refused))
    return Group(*parts)


class Refusal(TypedDict):
    """Candidates refused for one reason."""

    reason: str
    count: int
    examples: list[str]


def grouped(refused: Collection[Rejection]) -> list[Refusal]:
    """Refused candidates by reason, the most frequent first, with a few examples."""
    by_reason: dict[str, list[str]] = {}
    for rejection in refused:
        by_reason.setdefault(rejection.reason, []).append(rejection.plan)
    ranked = sorted(by_reason.items(), key=lambda entry: -len(entry[1]))
    return [Refusal(reason=reason, count=len(plans), examples=plans[:EXAMPLES]) for reason, plans in ranked]


def _layouts(best: Plan) -> Table:
    table = _table("plan", "model-stage", "tp", "pp", "dp", "micro-batch", "recompute", "devices")
    for ms in best.model_stages:
        assignment = best.of(ms)
        candidate = assignment.candidate
        degrees = (candidate.layout.tp, candidate.layout.pp, candidate.dp, candidate.micro_batch)
        units = " ".join(f"[{','.join(map(str, unit))}]" for unit in assignment.units)
        table.add_row(str(ms), *map(str, degrees), candidate.recompute, escape(units))
    return table


def _calls(estimate: Estimate) -> Table:
    """What limits the step: the calls on its critical path, the others beside it."""
    table = _table("step", "call", "seconds", "on the critical path")
    for name, seconds in estimate.call_s.items():
        table.add_row(name, f"{seconds:.3g}", "yes" if name in estimate.critical_path else "")
    return table


def _memory(problem: Problem, estimate: Estimate) -> Table:
    table = _table("memory", "device", "peak", "of usable", "what makes it")
    for device, peak in sorted(estimate.peak_bytes.items()):
        usable = problem.usable_bytes(device)
        share = f"{peak / usable:.0%} of {show_bytes(usable)}"
        table.add_row(str(device), show_bytes(peak), share, estimate.limits.get(device, ""))
    return table


def _runners_up(best: Scored, others: Sequence[Scored]) -> Table:
    table = _table("plans that came close", "step s", "slower by", "what differs")
    for scored in others:
        slower = scored.estimate.step_s / best.estimate.step_s - 1
        difference = changes(best.plan, scored.plan).replace("; ", "\n")
        table.add_row(f"{scored.estimate.step_s:.3g}", f"{slower:.1%}", escape(difference))
    return table


def _refused(refused: Collection[Rejection]) -> Table:
    table = _table("refused", "why", "how many", "for example")
    for entry in grouped(refused):
        table.add_row(escape(entry["reason"]), str(entry["count"]), escape("\n".join(entry["examples"])))
    return table


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left")
