"""The brain on the real cost model, planner and transition engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from nereus.controller.admission.always import Always
from nereus.controller.admission.never import Never
from nereus.controller.brain import Brain, remaining
from nereus.controller.loop import run, tick
from nereus.controller.outlook import Outlook, frugal
from nereus.controller.replay import Entry, replay
from nereus.core import (
    Adapt,
    Capabilities,
    ControllerState,
    Decision,
    EMUSet,
    InfeasibleError,
    Keep,
    Observation,
    Outcome,
    Pin,
    Plan,
    Restart,
    Trigger,
    expand,
)
from nereus.report.recorders.jsonl import Jsonl, read
from tests.controller.world import SCHEMAS, TRUTH, WORKFLOW, brain, happened
from tests.fakes import MIB, ScriptedExecutor, ScriptedJob, cluster, lengths, plan, workload

SPEED = 0.3


def begin(made: Brain, ready: int = 2, devices: int = 4, memory_bytes: int = 64 * MIB) -> ControllerState:
    return made.start(cluster(devices, memory_bytes, SPEED), workload(), range(ready))


def replan(made: Brain, state: ControllerState, seen: Observation) -> tuple[ControllerState, Decision]:
    """One tick without the hands."""
    state, triggers = made.take_in(state, seen)
    if not triggers:
        return state, Keep("nothing changed enough")
    decision = made.decide(state, triggers, made.propose(state))
    return made.rebase(state, triggers), decision


def settled(made: Brain, state: ControllerState, decision: Decision, seconds: float = 0.05) -> ControllerState:
    assert isinstance(decision, Adapt)
    return made.settle(state, decision, Outcome(decision.proposal.units, True, seconds))


def warmed(made: Brain, state: ControllerState, steps: int = 3) -> ControllerState:
    """After steps in which nothing drifts."""
    for step in range(1, steps + 1):
        ready = state.cluster.ids
        state, triggers = made.take_in(state, happened(state, step, ready))
        assert not triggers
    return state


def test_a_start_uses_only_what_is_ready_and_fits() -> None:
    state = begin(brain())
    assert state.plan.devices <= {0, 1}
    assert set(state.plan.model_stages) == set(WORKFLOW.model_stages)
    assert state.estimate is not None
    assert all(peak <= 0.9 * 64 * MIB for peak in state.estimate.peak_bytes.values())


def test_a_start_without_any_plan_that_fits_is_refused() -> None:
    with pytest.raises(InfeasibleError):
        begin(brain(), memory_bytes=MIB)


def test_measured_times_teach_the_prediction_within_a_few_steps() -> None:
    made = brain()
    state = warmed(made, begin(made), 6)
    assert state.last is not None
    assert state.last.step_s is not None
    assert state.estimate is not None
    assert state.estimate.step_s == pytest.approx(state.last.step_s, rel=0.02)
    assert state.values["predicted_step_s"] == pytest.approx(state.last.step_s, rel=0.05)


def test_new_devices_are_taken_when_they_pay_back() -> None:
    made = brain()
    state = warmed(made, begin(made))
    state, decision = replan(made, state, happened(state, 20, (0, 1, 2, 3)))
    assert isinstance(decision, Adapt)
    assert not decision.urgent
    assert decision.proposal.plan.devices > {0, 1}
    assert decision.proposal.saving_s > 0
    assert decision.proposal.dag.primitives
    assert decision.proposal.units == decision.proposal.dag.goal
    assert frozenset(expand(decision.proposal.plan)) == frozenset(decision.proposal.units)


def test_never_refuses_new_devices_and_still_leaves_departing_ones() -> None:
    made = brain(Never())
    state = warmed(made, begin(made))
    state, kept = replan(made, state, happened(state, 20, (0, 1, 2, 3)))
    assert isinstance(kept, Keep)
    seen = happened(state, 21, (0, 2, 3), departing=frozenset({1}))
    _, decision = replan(made, state, seen)
    assert isinstance(decision, Adapt)
    assert decision.urgent
    assert 1 not in decision.proposal.plan.devices


def test_departing_devices_still_give_their_state_and_lost_ones_do_not() -> None:
    made = brain()
    state = warmed(made, begin(made))
    leaving, _ = made.take_in(state, happened(state, 9, (0,), departing=frozenset({1})))
    assert leaving.units == state.units
    lost, _ = made.take_in(state, happened(state, 9, (0,)))
    assert lost.units == state.units.without_devices({1})
    assert leaving.cluster.ids == lost.cluster.ids == (0,)


@pytest.mark.parametrize("mean", [20.0, 5.0])
def test_a_drift_is_replanned_once_even_when_nothing_changes(mean: float) -> None:
    made = brain(Never())
    state = warmed(made, begin(made))
    fired = []
    for step in range(10, 16):
        state, decision = replan(made, state, happened(state, step, (0, 1), lengths(mean)))
        fired.append(decision.reason != "nothing changed enough")
    assert fired == [True, False, False, False, False, False]


def test_horizons_move_at_crossings_alone_and_survive_rejections() -> None:
    made = brain(Never())
    state = warmed(made, begin(made))
    mean, found = 10.0, []
    for step in range(10, 31):
        if step in (12, 18, 28):
            mean *= 1.5
        state, _ = replan(made, state, happened(state, step, (0, 1), lengths(mean)))
        found.append(state.horizons["length"].steps if "length" in state.horizons else None)
    assert found == [None, None] + [1.0] * 6 + [6.0] * 10 + [8.0] * 3


def test_a_peak_that_rises_for_reasons_nobody_knows_is_answered_before_the_memory_is_full() -> None:
    made = brain(Never())
    state = begin(made, ready=4)
    assert state.estimate is not None
    capacity = 64 * MIB
    device, first = max(state.estimate.peak_bytes.items(), key=lambda item: item[1])
    for step in range(1, 40):
        peak = first + step * 3 * MIB
        assert peak <= capacity, "memory ran out and no change was made"
        seen = happened(state, step, (0, 1, 2, 3))
        seen = replace(seen, peaks={**seen.peaks, device: peak})
        before = state.plan
        state, decision = replan(made, state, seen)
        if isinstance(decision, Adapt):
            assert decision.urgent
            assert state.estimate is not None
            planned = Outlook(
                WORKFLOW, made.capabilities, SCHEMAS, state.pool, state.workload, state.calibration, 0.1, 8
            )
            was, now = planned.estimate(before).peak_bytes, planned.estimate(decision.proposal.plan).peak_bytes
            assert max(now.values()) < max(was.values())
            return
    pytest.fail("nothing happened in 40 steps")


def test_an_out_of_memory_event_changes_the_plan_even_where_the_prediction_saw_room() -> None:
    made = brain(Never())
    state = warmed(made, begin(made))
    assert state.estimate is not None
    capacity = int(1.5 * max(state.estimate.peak_bytes.values()))
    tight = cluster(4, capacity, SPEED)
    state = replace(state, pool=tight, cluster=tight.only((0, 1)))
    event = replace(happened(state, 9, (0, 1)), step_s=None, out_of_memory="device 0: logits needs 9 bytes")
    state, decision = replan(made, state, event)
    assert isinstance(decision, Adapt), decision
    assert decision.urgent
    assert decision.proposal.plan != state.plan


def test_times_of_a_broken_step_teach_nothing() -> None:
    made = brain()
    state = warmed(made, begin(made), 6)
    part = happened(state, 9, (0, 1))
    part = replace(part, call_s={name: 0.01 * s for name, s in part.call_s.items()})
    broken, _ = made.take_in(state, replace(part, step_s=None, out_of_memory="device 0: full"))
    rest, _ = made.take_in(broken, replace(part, step_s=0.01))
    assert rest.calibration.efficiency == state.calibration.efficiency
    whole, _ = made.take_in(rest, happened(rest, 10, (0, 1)))
    assert whole.calibration.efficiency != state.calibration.efficiency


def test_a_smaller_micro_batch_alone_moves_nothing_and_costs_nothing() -> None:
    layout = Pin(tp=1, pp=1, dp=1)
    pins = {ms: replace(layout, devices=(0,)) for ms in WORKFLOW.model_stages}
    made = brain(Always(), Capabilities(recompute=("none",), pins=pins))
    state = begin(made, ready=1, devices=1)
    big = Plan(tuple(replace(a, candidate=replace(a.candidate, micro_batch=8)) for a in state.plan.assignments))
    state = replace(state, plan=big)
    pressed = replace(state, values={**state.values, "memory_pressure": 2.0, "memory": 1.1})
    assert pressed.estimate is not None
    peak = max(made.propose(pressed).proposals[0].estimate.peak_bytes.values())
    tight = cluster(1, int(peak / 0.9) + 1, SPEED)
    options = made.propose(replace(pressed, pool=tight, cluster=tight))
    assert options.current is None
    assert options.proposals
    for proposal in options.proposals:
        assert not proposal.dag.primitives
        assert proposal.transition.seconds == 0


def test_what_a_transition_took_is_learnt_with_its_slow_first_step() -> None:
    made = brain()
    state = warmed(made, begin(made), 6)
    state, decision = replan(made, state, happened(state, 20, (0, 1, 2, 3)))
    state = settled(made, state, decision, seconds=0.2)
    assert state.calibration.transition_count == 0
    state, _ = made.take_in(state, happened(state, 21, (0, 1, 2, 3), extra_s=6.0))
    assert state.calibration.transition_count == 1
    assert state.calibration.transition_overhead_s == pytest.approx(6.2, rel=0.25)
    assert state.pending_transition_s is None
    state, _ = made.take_in(state, happened(state, 22, (0, 1, 2, 3), extra_s=6.0))
    assert state.calibration.transition_count == 1


def test_a_learnt_cost_raises_the_price_of_the_next_transition() -> None:
    made = brain()
    state = warmed(made, begin(made), 4)
    seen = happened(state, 20, (0, 1, 2, 3))
    naive, triggers = made.take_in(state, seen)
    wise = replace(naive, calibration=replace(naive.calibration, transition_overhead_s=60.0, transition_count=3))
    cheap, dear = made.propose(naive).proposals[0], made.propose(wise).proposals[0]
    assert dear.transition.seconds > cheap.transition.seconds + 50
    assert isinstance(made.decide(naive, triggers, made.propose(naive)), Adapt)
    assert isinstance(made.decide(wise, triggers, made.propose(wise)), Keep)


def test_a_transition_that_stopped_half_way_is_taken_up_at_the_next_boundary() -> None:
    made = brain()
    state = warmed(made, begin(made))
    state, decision = replan(made, state, happened(state, 20, (0, 1, 2, 3)))
    assert isinstance(decision, Adapt)
    goal = decision.proposal.units
    kept = [u for u in goal if u in state.units.units]
    late = next(u for u in goal if u not in kept)
    old = [u for u in state.units if u.model_stage == late.model_stage and u not in kept]
    half = EMUSet((*(u for u in goal if u != late), *old))
    assert frozenset(half) not in (frozenset(state.units), frozenset(goal))
    stopped = made.settle(state, decision, Outcome(half, False, 0.1, error="lost"))
    assert stopped.plan == state.plan
    assert stopped.units == half
    after, triggers = made.take_in(stopped, happened(stopped, 21, (0, 1, 2, 3)))
    assert Trigger("units", True, "the last transition stopped half-way") in triggers
    again = made.decide(after, triggers, made.propose(after))
    assert isinstance(again, Adapt)
    assert again.proposal.dag.start == half


def test_when_the_last_copy_is_lost_the_job_restarts_from_its_checkpoint() -> None:
    made = brain()
    state = warmed(made, begin(made))
    gone = replace(state, units=EMUSet(tuple(u for u in state.units if u.model_stage != WORKFLOW.model_stages[-1])))
    after, decision = replan(made, gone, happened(gone, 9, (0, 1)))
    assert isinstance(decision, Restart)
    begun = made.begin(after, decision.plan, expand(decision.plan))
    assert begun.units == expand(begun.plan)
    assert begun.calibration == after.calibration


def test_when_nothing_fits_the_answer_is_no_with_the_missing_bytes() -> None:
    made = brain()
    state = warmed(made, begin(made))
    tiny = cluster(4, MIB, SPEED)
    _, decision = replan(made, replace(state, pool=tiny), happened(state, 9, (0,), departing=frozenset({1})))
    assert isinstance(decision, Keep)
    assert "short" in decision.reason


def test_degrees_pinned_beyond_what_is_left_end_in_an_answer_and_not_in_an_error() -> None:
    pins = {ms: Pin(tp=1, pp=1, dp=2) for ms in WORKFLOW.model_stages}
    made = brain(capabilities=Capabilities(recompute=("none",), pins=pins))
    state = begin(made)
    _, decision = replan(made, state, happened(state, 9, (0,), departing=frozenset({1})))
    assert isinstance(decision, Keep)
    assert "needs 2 devices of 1" in decision.reason


def test_savings_are_discounted_by_what_is_not_known_about_the_difference() -> None:
    made = brain()
    state = warmed(made, begin(made), 6)
    after, _ = made.take_in(state, happened(state, 20, (0, 1, 2, 3)))
    vague = replace(
        after.calibration,
        efficiency={n: replace(e, variance=e.variance + 0.5) for n, e in after.calibration.efficiency.items()},
    )
    sure = {p.plan: p.saving_s for p in made.propose(after).proposals}
    unsure = {p.plan: p.saving_s for p in made.propose(replace(after, calibration=vague)).proposals}
    common = sure.keys() & unsure.keys()
    assert common
    assert all(unsure[each] < sure[each] for each in common)


def test_seconds_by_class_add_up_to_the_step() -> None:
    made = brain()
    state = warmed(made, begin(made, ready=4))
    for calibration in (TRUTH, state.calibration):
        outlook = Outlook(WORKFLOW, made.capabilities, SCHEMAS, state.pool, state.workload, calibration, 0.1, 8)
        found = outlook.model.class_s(state.plan)
        assert sum(found.values()) == pytest.approx(outlook.estimate(state.plan).step_s)


def test_what_remains_of_a_plan_drops_whole_units() -> None:
    assert remaining(plan(0, 1, 2, 3, tp=2), frozenset({0, 1, 2})) == plan(0, 1, tp=2)
    assert remaining(plan(0, 1, tp=2), frozenset({0})) is None


def test_frugal_variants_keep_every_device_and_respect_pins() -> None:
    start = plan(0, 1, micro_batch=8)
    sizes = [
        (p.assignments[0].candidate.micro_batch, p.assignments[0].candidate.recompute)
        for p in frugal(start, Capabilities())
    ]
    assert sizes == [(8, "none"), (4, "none"), (2, "none"), (1, "none"), (1, "full")]
    limited = Capabilities(micro_batches=(3, 8), recompute=("none",))
    assert [p.assignments[0].candidate.micro_batch for p in frugal(start, limited)] == [8, 3]
    pinned = Capabilities(pins={start.model_stages[0]: Pin(micro_batch=8)}, recompute=("none",))
    assert list(frugal(start, pinned)) == [start]
    assert not list(frugal(start, Capabilities(pins={start.model_stages[0]: Pin(dp=3)})))


def course(state: ControllerState) -> Iterable[Observation]:
    """A pool that comes and goes while lengths grow; facts are those of the plan at the start."""
    pools = {4: (0, 1, 2, 3), 14: (0, 1, 2), 20: (0, 1, 2, 3)}
    ready: tuple[int, ...] = (0, 1)
    mean = 8.0
    for step in range(1, 25):
        before, ready = ready, pools.get(step, ready)
        mean *= 1.06
        gone = frozenset(before) - frozenset(ready)
        yield happened(state, step, ready, lengths(mean), departing=gone)


def test_a_recorded_run_replays_to_the_same_decisions(tmp_path: Path) -> None:
    made = brain()
    state = begin(made)
    job = ScriptedJob(list(course(state)))
    last = run(job, ScriptedExecutor(seconds=0.02), made, [Jsonl(tmp_path)], state)
    (part,) = read(tmp_path)
    again = replay(part.entries, brain(), part.state)
    assert [entry.decision for entry in part.entries] == list(again.decisions)
    assert again.state == last
    kinds = [type(decision) for decision in again.decisions]
    assert Adapt in kinds
    assert Keep in kinds


def test_a_record_can_be_replayed_under_another_rule(tmp_path: Path) -> None:
    made = brain()
    state = begin(made)
    run(ScriptedJob(list(course(state))), ScriptedExecutor(seconds=0.02), made, [Jsonl(tmp_path)], state)
    (part,) = read(tmp_path)
    other = replay(part.entries, brain(Never()), part.state)
    assert all(not isinstance(d, Adapt) or d.urgent for d in other.decisions)


def test_a_tick_with_the_real_brain_hands_the_new_plan_to_the_job() -> None:
    made = brain()
    state = warmed(made, begin(made))
    seen = happened(state, 20, (0, 1, 2, 3))
    job = ScriptedJob([seen])
    notes: list[Entry] = []
    note: Callable[..., None] = lambda *facts: notes.append(Entry(*facts))  # noqa: E731
    after = tick(state, seen.boundary, job, ScriptedExecutor(seconds=0.1), made, note)
    assert job.adopted == [(after.units, after.plan)]
    assert after.plan.devices > {0, 1}
    assert isinstance(notes[0].decision, Adapt)
