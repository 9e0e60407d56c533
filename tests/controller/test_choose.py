"""Which decision follows from what a replan found."""

from __future__ import annotations

import pytest

from nereus.controller.admission.always import Always
from nereus.controller.admission.every_n import EveryN
from nereus.controller.admission.never import Never
from nereus.controller.admission.payback import Payback as Rule
from nereus.controller.choose import choose
from nereus.core import Adapt, Decision, Horizon, Keep, Options, Proposal, Rejection, Restart, Trigger
from nereus.core.ports import AdmissionRule
from tests.fakes import estimate, plan, proposal, state

NOW = plan(0, 1)
LENGTH = Trigger("length", False, "length 10 → 14")
LEAVING = Trigger("devices", True, "device 3 leaving")
CURRENT = estimate(2.0)
FIRST, SECOND, THIRD = plan(0, 1, tp=2), plan(0, 1, pp=2), plan(0)


def decide(
    triggers: list[Trigger],
    *proposals: Proposal,
    rule: AdmissionRule | None = None,
    steps: dict[str, float] | None = None,
    step: int = 7,
    options: Options | None = None,
) -> Decision:
    horizons = {name: Horizon(value, 0, 1) for name, value in (steps or {}).items()}
    found = options or Options(proposals, current=CURRENT)
    return choose(state(NOW, horizons=horizons), triggers, found, rule or Rule(), step)


def test_a_change_that_pays_back_within_half_of_the_horizon_is_made() -> None:
    target = proposal(NOW, FIRST, 1.6, saving_s=0.4, transition_s=1.2)
    yes = decide([LENGTH], target, steps={"length": 6.0})
    assert isinstance(yes, Adapt)
    assert not yes.urgent
    assert yes.payback.steps == pytest.approx(3.0)
    assert (yes.payback.horizon_steps, yes.payback.margin) == (6.0, 0.5)
    no = decide([LENGTH], target, steps={"length": 5.9})
    assert isinstance(no, Keep)
    assert "pays back in 3.0 of 5.9 steps (margin 0.5)" in no.reason
    assert "tp1 pp1 dp2 → tp2 pp1 dp1" in no.reason


def test_before_the_first_interval_the_horizon_is_one_step() -> None:
    cheap = proposal(NOW, FIRST, 1.0, saving_s=1.0, transition_s=0.5)
    assert isinstance(decide([LENGTH], cheap), Adapt)
    dear = proposal(NOW, FIRST, 1.0, saving_s=1.0, transition_s=0.51)
    assert isinstance(decide([LENGTH], dear), Keep)


def test_of_several_triggers_the_smallest_horizon_counts() -> None:
    target = proposal(NOW, FIRST, 1.0, saving_s=1.0, transition_s=2.0)
    grown = Trigger("devices", False, "device 4 new")
    assert isinstance(decide([LENGTH], target, steps={"length": 10.0}), Adapt)
    assert isinstance(decide([LENGTH, grown], target, steps={"length": 10.0, "devices": 2.0}), Keep)


def test_the_proposal_that_gains_most_within_the_horizon_wins_not_the_fastest() -> None:
    fastest = proposal(NOW, FIRST, 1.0, saving_s=1.0, transition_s=4.0)
    cheaper = proposal(NOW, SECOND, 1.1, saving_s=0.9, transition_s=0.1)
    short = decide([LENGTH], fastest, cheaper, steps={"length": 10.0})
    assert isinstance(short, Adapt)
    assert short.proposal is cheaper
    long = decide([LENGTH], fastest, cheaper, steps={"length": 100.0})
    assert isinstance(long, Adapt)
    assert long.proposal is fastest


def test_keeping_lists_every_proposal_with_its_arithmetic() -> None:
    kept = decide([LENGTH], *(proposal(NOW, p, 1.9, 0.01, 1.0) for p in (FIRST, SECOND)))
    assert isinstance(kept, Keep)
    assert [r.plan for r in kept.rejected] == [
        "actor/training tp1 pp1 dp2 → tp2 pp1 dp1",
        "actor/training tp1 pp1 dp2 → tp1 pp2 dp1",
    ]
    assert all("costs 1 s" in r.reason for r in kept.rejected)


def test_the_other_rules_see_the_same_proposals() -> None:
    dear = proposal(NOW, FIRST, 1.9, saving_s=0.1, transition_s=50.0)
    good = proposal(NOW, FIRST, 1.0, saving_s=1.0, transition_s=0.0)
    assert isinstance(decide([LENGTH], dear, rule=Always()), Adapt)
    assert isinstance(decide([LENGTH], good, rule=Never()), Keep)
    assert isinstance(decide([LENGTH], good, rule=EveryN(n=3), step=6), Adapt)
    assert isinstance(decide([LENGTH], good, rule=EveryN(n=3), step=7), Keep)


def test_an_urgent_change_needs_no_profit_under_any_rule() -> None:
    slower = proposal(NOW, FIRST, 3.0, saving_s=-1.0, transition_s=9.0)
    for rule in (Rule(), Never(), Always(), EveryN()):
        made = decide([LEAVING], rule=rule, options=Options((slower,)))
        assert isinstance(made, Adapt)
        assert made.urgent


def test_an_urgent_change_weighs_step_time_against_the_transition() -> None:
    fast = proposal(NOW, FIRST, 1.0, saving_s=0.0, transition_s=5.0)
    near = proposal(NOW, SECOND, 1.2, saving_s=-0.2, transition_s=0.1)
    found = Options((fast, near), (Rejection("x", "does not fit"),))
    soon = decide([LEAVING], options=found)
    late = decide([LEAVING], options=found, steps={"devices": 100.0})
    assert isinstance(soon, Adapt)
    assert isinstance(late, Adapt)
    assert (soon.proposal, late.proposal) == (near, fast)
    assert [r.plan for r in soon.rejected] == ["x", "actor/training tp1 pp1 dp2 → tp2 pp1 dp1"]


def test_an_urgent_trigger_that_leaves_the_plan_valid_asks_for_profit() -> None:
    slower = proposal(NOW, FIRST, 3.0, saving_s=-1.0, transition_s=1.0)
    assert isinstance(decide([LEAVING], slower), Keep)


def test_without_any_way_an_urgent_change_restarts_and_without_any_plan_it_says_why() -> None:
    refused = (Rejection("y", "device 0 is 4 bytes short"),)
    restart = decide([LEAVING], options=Options((), refused, fallback=THIRD))
    assert restart == Restart(THIRD, "no transition to a plan that fits can be executed", refused)
    kept = decide([LEAVING], options=Options((), refused))
    assert isinstance(kept, Keep)
    assert "device 0 is 4 bytes short" in kept.reason


def test_an_opportunistic_replan_never_restarts() -> None:
    assert isinstance(decide([LENGTH], options=Options((), (), CURRENT, fallback=THIRD)), Keep)
