"""What a person is told while a job runs and when it has ended."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from nereus.controller.loop import run
from nereus.core import (
    Call,
    Decision,
    Keep,
    Merge,
    ModelSpec,
    Outcome,
    Split,
    TransitionDAG,
    Work,
    Workflow,
    codec,
    expand,
)
from nereus.report.history import History
from nereus.report.live import Live
from nereus.report.summary import facts, render, speed_note, summarise
from nereus.report.trace import events, write
from tests.fakes import (
    TRAINING,
    ScriptedBrain,
    ScriptedExecutor,
    ScriptedJob,
    adapt,
    cluster,
    plan,
    proposal,
    seen,
    state,
)

NOW, TARGET = plan(0, 1), plan(0, 1, tp=2)
CHANGE = proposal(NOW, TARGET, 0.8, 0.2, 0.1)
MERGE = Merge("merge", expand(NOW).units[:1], expand(TARGET).units[:1], "all")
MOVE = replace(CHANGE, dag=replace(CHANGE.dag, primitives=(MERGE,)))


def recorded() -> History:
    """Step 1 keeps, step 2 adapts by urgency, step 3 adapts for profit (to the same plan), step 4 sees no trigger."""
    history = History()
    job = ScriptedJob(
        [seen(step, [0, 1], elapsed_s=10.0 * step, call_s={"update_actor": 4.0}) for step in (1, 2, 3, 4)]
    )
    decisions: list[Decision] = [Keep("no"), adapt(MOVE, urgent=True), adapt(CHANGE)]
    run(job, ScriptedExecutor(seconds=0.5), ScriptedBrain(decisions), [history], state(NOW, 2))
    for step in range(1, 13):
        history.metrics(step, {"val/score": step / 12, "nereus/prediction_error": 0.1 if step % 2 else -0.3})
    return history


def test_the_summary_counts_decisions_and_transitions() -> None:
    found = summarise(recorded())
    assert (found.urgent, found.opportunistic, found.kept, found.restarts) == (1, 1, 1, 0)
    assert (found.steps, found.elapsed_s, found.transitions, found.transition_s) == (4, 40.0, 1, 0.5)
    assert found.transition_share == pytest.approx(0.5 / 40)
    assert len(found.decisions) == 3


def test_steps_are_grouped_by_the_plan_they_ran_under() -> None:
    periods = summarise(recorded()).periods
    assert [(p.first_step, p.last_step, p.plan) for p in periods] == [
        (1, 2, NOW.describe()),
        (3, 4, TARGET.describe()),
    ]
    assert [p.measured_s for p in periods] == [1.0, 1.0]


def test_errors_of_predictions_do_not_cancel() -> None:
    assert summarise(recorded()).prediction_error == pytest.approx(0.2)


def test_a_series_is_shown_by_its_first_and_last_five_values() -> None:
    ends = summarise(recorded()).verifier
    assert ends is not None
    assert ends.first == pytest.approx(3 / 12)
    assert ends.last == pytest.approx(10 / 12)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([0.25], "0.25 → 0.25 (first and last)"),
        ([0.25, 0.5], "0.25 → 0.5 (first and last)"),
        ([0.25, 0.5, 0.75, 1.0], "0.375 → 0.875 (mean of the first and last 2)"),
    ],
)
def test_no_value_of_a_short_series_counts_as_first_and_last(values: list[float], told: str) -> None:
    history = History()
    for step, value in enumerate(values, start=1):
        history.metrics(step, {"val/score": value})
    assert f"verifier score (held out): {told}" in facts(summarise(history))


def test_pacing_is_always_stated() -> None:
    assert speed_note(cluster(2, speed=0.3)) == "speed 0.3: devices paced at 0.3 of a core: not a benchmark"
    assert speed_note(cluster(2)) == "speed 1: devices are not paced"
    assert facts(summarise(recorded()))[-1] == "speed 1: devices are not paced"


def test_the_summary_can_be_printed_and_written_as_json() -> None:
    found = summarise(recorded())
    console = Console(file=io.StringIO(), width=120)
    console.print(render(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "decisions: adapt urgent 1, adapt opportunistic 1, keep 1" in text
    assert "transitions that moved state: 1, 0.50 s, 1.2% of the run" in text
    assert json.loads(json.dumps(codec.encode(found)))["urgent"] == 1


def test_an_empty_run_has_a_summary() -> None:
    assert summarise(History()).steps == 0


def shown(terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal)
    with Live(console, total_steps=2) as live:
        job = ScriptedJob([seen(step, [0, 1]) for step in (1, 2)])
        run(job, ScriptedExecutor(), ScriptedBrain([adapt(CHANGE)]), [live], state(NOW, 2))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_without_a_terminal_progress_is_plain_lines() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0] == f"plan: {NOW.describe()}"
    assert lines[1].startswith("step 1 adapt (opportunistic: scripted): actor/training")
    assert lines[2].startswith("step 1/2: length 10.0")
    assert not any("\x1b" in line for line in lines)


def test_on_a_terminal_the_panel_shows_the_plan_and_decisions_stay_above_it() -> None:
    text = shown(terminal=True)
    assert "step 2/2" in text
    assert TARGET.describe() in text
    assert "step 1 adapt (opportunistic: scripted)" in text


def workflow() -> Workflow:
    sizes = ModelSpec(family="llama", layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn_hidden=16, vocab=32)
    return Workflow((Call("update_actor", TRAINING, Work.UPDATE, ("tokens",)),), {"actor": sizes})


def test_the_timeline_shows_every_device_of_a_call_at_the_end_of_its_step(tmp_path: Path) -> None:
    found = [event for event in events(recorded(), workflow()) if event["name"] == "update_actor"]
    first = [event for event in found if event["args"]["step"] == 1]
    assert [(event["tid"], event["ts"], event["dur"]) for event in first] == [(0, 9e6, 4e6), (1, 9e6, 4e6)]
    write(tmp_path / "trace.json", recorded(), workflow())
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_primitives_on_one_device_follow_each_other_in_the_timeline() -> None:
    target = expand(plan(0, 1))
    start = expand(plan(0, 1, tp=2))
    parts = tuple(Split(f"s{index}", start.units, (unit,), f"g{index}") for index, unit in enumerate(target.units))
    dag = TransitionDAG(start, target, parts)
    history = History()
    history.begin(state(plan(0, 1, tp=2), 2))
    observation = seen(1, [0, 1], elapsed_s=5.0)
    base = proposal(plan(0, 1, tp=2), plan(0, 1), 1.0, 0.1, 0.1)
    chosen = type(base)(base.plan, base.units, dag, base.estimate, base.transition, base.saving_s)
    outcome = Outcome(target, True, 0.5, primitive_s={"s0": 0.25, "s1": 0.125})
    history.record(observation.boundary, observation, (), adapt(chosen), outcome)
    spans = [(e["ts"], e["dur"], e["tid"]) for e in events(history, workflow()) if e["name"].startswith("Split")]
    assert spans == [(5e6, 0.25e6, 0), (5e6, 0.25e6, 1), (5.25e6, 0.125e6, 0), (5.25e6, 0.125e6, 1)]
