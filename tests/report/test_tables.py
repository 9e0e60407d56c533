"""A plan on the screen: what limits it, what came close, what was refused."""

from __future__ import annotations

import io

from rich.console import Console

from nereus.core import Capabilities, Rejection
from nereus.planning.problem import Problem
from nereus.planning.search import search
from nereus.report import tables
from nereus.report.answer import answer
from tests.controller.world import WORKFLOW
from tests.fakes import cluster, workload


def test_a_plan_explains_itself_in_numbers() -> None:
    problem = Problem(WORKFLOW, workload(), cluster(2, speed=0.3), Capabilities(recompute=("none",)))
    result = search(problem)
    console = Console(file=io.StringIO(), width=160)
    console.print(tables.answer(answer(problem, widest=Capabilities())))
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    best = result.best[0]
    for ms in best.plan.model_stages:
        assert str(ms) in text
        assert f"[{best.plan.of(ms).units[0][0]}" in text, "device lists must not be taken for markup"
    assert f"predicted step {best.estimate.step_s:.3g} s" in text
    assert all(limit.split(":")[0] in text for limit in best.estimate.limits.values())
    assert "plans that came close" in text


def test_a_narrow_screen_cuts_nothing() -> None:
    shown = answer(Problem(WORKFLOW, workload(), cluster(2, speed=0.3), Capabilities()), widest=Capabilities())
    console = Console(file=io.StringIO(), width=70)
    console.print(tables.answer(shown))
    assert "…" not in str(console.file.getvalue())  # type: ignore[attr-defined]


def test_refusals_are_grouped_by_reason() -> None:
    refused = [Rejection(f"plan {index}", "too large") for index in range(5)] + [Rejection("other", "too slow")]
    found = tables.grouped(refused[::-1])
    assert found == [
        {"reason": "too large", "count": 5, "examples": ["plan 4", "plan 3", "plan 2"]},
        {"reason": "too slow", "count": 1, "examples": ["other"]},
    ]
