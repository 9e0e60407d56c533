"""Plans beside the best: what is folded into one row, and what another layout of a heavy model-stage costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.core import Capabilities, ModelStage, Pin
from nereus.planning.problem import Problem
from nereus.planning.search import search
from nereus.report import close
from nereus.report.close import RunnerUp
from nereus.report.views import PlanView
from tests.cost.jobs import ACTOR, GENERATION, REFERENCE, SMALL, WORKLOAD, cluster, grpo

ABLE = Capabilities(recompute=("none",))
PROBLEM = Problem(grpo(SMALL), WORKLOAD, cluster(4), ABLE)


def test_plans_as_fast_are_one_row_and_so_are_those_that_differ_in_the_same_places() -> None:
    plan = search(PROBLEM, 1).best[0].plan
    others = [
        RunnerUp(plan, 10.0 * (1 + slower), slower, f"change {number}", where)
        for number, (slower, where) in enumerate(
            [
                (0.0, (REFERENCE,)),
                (0.001, (REFERENCE, ACTOR)),
                (0.02, (ACTOR,)),
                (0.03, (GENERATION,)),
                (0.04, (ACTOR,)),
            ]
        )
    ]
    assert list(close.rows(others)) == [
        ("10", "<= 0.1%", "2 as fast, with other layouts of reference/inference, actor/training: change 0"),
        ("10.2", "2.0%", "change 2; 1 more in the same model-stages"),
        ("10.3", "3.0%", "change 3"),
    ]


def test_another_tp_of_a_heavy_model_stage_is_the_best_plan_with_it() -> None:
    first = search(PROBLEM, 1).best[0]
    view = PlanView.of(PROBLEM, PROBLEM.model(), first)
    found = close.alternatives(PROBLEM, first, view)
    heavy = sorted(view.stages, key=lambda stage: -stage.seconds)[0].model_stage
    assert any(heavy == str(ms) for other in found for ms in other.where)
    for other in found:
        changed = [ms for ms in other.where
                   if other.plan.of(ms).candidate.layout.tp != first.plan.of(ms).candidate.layout.tp]  # fmt: skip
        assert changed
        fastest = min(
            search(replace(PROBLEM, capabilities=replace(ABLE, pins={ms: Pin(tp=tp)})), 1).best[0].estimate.step_s
            for ms in changed for tp in (other.plan.of(ms).candidate.layout.tp,)
        )  # fmt: skip
        assert other.step_s >= fastest * (1 - 1e-9)
        assert other.slower == pytest.approx(other.step_s / first.estimate.step_s - 1)
        name, _, tp = other.asked.rpartition(" tp")
        assert other.plan.of(ModelStage.parse(name)).candidate.layout.tp == int(tp)
        assert close.row(other)[2].startswith(f"with {other.asked}; ")


def test_a_plan_beside_the_best_says_which_calls_take_longer() -> None:
    """Differences by call, the largest first; those that do not matter to the step are left out."""
    plan = search(PROBLEM, 1).best[0].plan
    calls = (("update", 1.5), ("generate", -0.25), ("scores", 0.02), ("sync", 0.001))
    assert RunnerUp(plan, 10.0, 0.1, "change", (ACTOR,), calls).why == "update +1.5 s, generate -0.25 s, scores +0.02 s"
    first, *others = search(PROBLEM, 4).best
    for other in others:
        found = RunnerUp.of(first, other)
        sizes = [abs(more) for _, more in found.calls]
        assert sizes == sorted(sizes, reverse=True)
        assert found.step_s - first.estimate.step_s <= sum(max(more, 0.0) for _, more in found.calls) + 1e-9


def test_what_is_pinned_has_no_alternatives() -> None:
    pinned = replace(PROBLEM, capabilities=replace(ABLE, pins={ms: Pin(tp=1) for ms in (GENERATION, REFERENCE, ACTOR)}))
    first = search(pinned, 1).best[0]
    assert close.alternatives(pinned, first, PlanView.of(pinned, pinned.model(), first)) == ()
