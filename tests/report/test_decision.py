"""The line of each decision: what, why, and the arithmetic."""

from __future__ import annotations

from dataclasses import replace

from nereus.controller.changes import changes
from nereus.core import Adapt, Boundary, Keep, Outcome, Payback, Restart, Trigger, expand
from nereus.report.decision import line
from tests.fakes import TRAINING, plan, proposal

WHERE = Boundary(23, 100.0)
NOW, TARGET = plan(0, 1, 2, 3, tp=2), plan(0, 1, 2, 3, pp=2)
LEAVES = Trigger("devices", True, "device 3 leaving")


def test_an_urgent_change_shows_cause_change_and_payback() -> None:
    chosen = proposal(NOW, TARGET, 1.0, 0.41, 0.8)
    decision = Adapt(chosen, True, Payback(0.82, 0.41, 6.0, 0.5), changes(NOW, TARGET))
    assert line(WHERE, [LEAVES], decision, None) == (
        "step 23 adapt (urgent: device 3 leaving): actor/training tp2 pp1 dp2 → tp1 pp2 dp2; "
        "saves 0.41 s/step, costs 0.82 s, pays back in 2.0 of 6.0 steps (margin 0.5)"
    )


def test_what_the_transition_took_is_added() -> None:
    decision = Adapt(proposal(NOW, TARGET, 1.0, 0.4, 0.8), False, Payback(0.8, 0.4, 6.0, 0.5), changes(NOW, TARGET))
    done = Outcome(expand(TARGET), True, 0.75, received_bytes={0: 1_500_000, 1: 500_000})
    assert line(WHERE, [LEAVES], decision, done).endswith("took 0.75 s, 2.00 MB moved")
    stopped = replace(done, completed=False, error="device 3 is lost")
    assert line(WHERE, [LEAVES], decision, stopped).endswith("stopped after 0.75 s: device 3 is lost")


def test_an_urgent_change_that_saves_nothing_says_so() -> None:
    decision = Adapt(proposal(NOW, TARGET, 1.0, -0.2, 0.8), True, Payback(0.8, -0.2, 1.0, 0.5), "x")
    assert "saves nothing (-0.2 s/step), costs 0.8 s" in line(WHERE, [LEAVES], decision, None)


def test_keeping_and_restarting_say_why() -> None:
    grown = Trigger("length", False, "length 10.0 → 14.0, +40%")
    assert line(WHERE, [grown], Keep("best of 8: does not pay"), None) == (
        "step 23 keep (length 10.0 → 14.0, +40%): best of 8: does not pay"
    )
    text = line(WHERE, [LEAVES], Restart(TARGET, "no way leads there"), None)
    assert text.startswith("step 23 restart (device 3 leaving): no way leads there")
    assert TARGET.describe() in text


def test_changes_name_only_what_changes() -> None:
    assert changes(NOW, NOW) == "the same plan"
    assert changes(plan(0, 1, micro_batch=4), plan(0, 1, micro_batch=2)) == f"{TRAINING} mb4 → mb2"
    assert changes(plan(0, 1), plan(0, 2)) == f"{TRAINING} devices [0,1] → [0,2]"
    assert changes(plan(0, 1), plan(0, 1, 2)) == f"{TRAINING} tp1 pp1 dp2 → tp1 pp1 dp3, devices [0,1] → [0,1,2]"
    assert changes(plan(0, 1, tp=2), plan(1, 0, tp=2)) == f"{TRAINING} other positions"
