"""One tick at a time, with everything around the loop scripted."""

from __future__ import annotations

import logging

import pytest

from nereus.controller.loop import run, tick
from nereus.core import Adapt, Boundary, Decision, EMUSet, Keep, Restart, expand
from tests.fakes import Notebook, ScriptedBrain, ScriptedExecutor, ScriptedJob, adapt, plan, proposal, seen, state

NOW, TARGET = plan(0, 1), plan(0, 1, tp=2)
CHANGE = adapt(proposal(NOW, TARGET, 1.0, 0.2, 0.1))


def one_tick(*decisions: Decision, stopped: EMUSet | None = None) -> tuple[list[str], ScriptedJob, Notebook]:
    log: list[str] = []
    job = ScriptedJob([seen(3, [0, 1])], log)
    notes = Notebook()
    executor = ScriptedExecutor(log, stopped=stopped)
    brain = ScriptedBrain(list(decisions), log)
    tick(state(NOW), Boundary(3, 3.0), job, executor, brain, notes.record)
    return log, job, notes


def test_without_a_trigger_nothing_is_planned_and_the_tick_is_recorded() -> None:
    log, job, notes = one_tick()
    assert log == ["take_in"]
    assert not job.adopted
    assert notes.ticks == [(Boundary(3, 3.0), Keep("nothing changed enough"), None)]


def test_references_are_reset_even_when_the_answer_is_no() -> None:
    log, _, _ = one_tick(Keep("does not pay"))
    assert log == ["take_in", "propose", "decide", "rebase"]


def test_a_change_happens_while_the_job_is_paused_and_is_settled_after() -> None:
    log, job, notes = one_tick(CHANGE)
    assert log == ["take_in", "propose", "decide", "rebase", "pause", "execute", "adopt", "resume", "settle"]
    assert job.adopted == [(expand(TARGET), TARGET)]
    assert notes.ticks[0][1] == CHANGE


def test_a_transition_that_stops_half_way_leaves_the_plan_and_its_batches_as_they_were() -> None:
    half = EMUSet(expand(NOW).units[:1])
    _, job, notes = one_tick(CHANGE, stopped=half)
    assert job.adopted == [(half, None)]
    outcome = notes.ticks[0][2]
    assert outcome is not None
    assert not outcome.completed


def test_a_restart_begins_from_the_units_the_job_made() -> None:
    log, _, _ = one_tick(Restart(TARGET, "nothing else"))
    assert log[-2:] == ["restart", "begin"]


class Broken(Notebook):
    """A recorder whose disk is full."""

    def record(self, *facts: object) -> None:
        raise OSError(f"no space left on device for {len(facts)} facts")


def test_a_failing_recorder_neither_stops_the_run_nor_silences_the_others(caplog: pytest.LogCaptureFixture) -> None:
    job = ScriptedJob([seen(step, [0, 1]) for step in (1, 2, 3)])
    notes = Notebook()
    with caplog.at_level(logging.ERROR):
        run(job, ScriptedExecutor(), ScriptedBrain(), [Broken(), notes], state(NOW))
    assert [boundary.step for boundary, _, _ in notes.ticks] == [1, 2, 3]
    assert len([r for r in caplog.records if "Broken" in r.getMessage()]) == 3


def test_a_run_tells_recorders_where_it_starts() -> None:
    notes = Notebook()
    begun = state(NOW)
    run(ScriptedJob([]), ScriptedExecutor(), ScriptedBrain(), [notes], begun)
    assert notes.began == [begun]


def test_every_decision_reaches_the_recorders_in_order() -> None:
    job = ScriptedJob([seen(step, [0, 1]) for step in (1, 2)])
    notes = Notebook()
    run(job, ScriptedExecutor(), ScriptedBrain([CHANGE, Keep("no")]), [notes], state(NOW))
    assert [type(decision) for _, decision, _ in notes.ticks] == [Adapt, Keep]
