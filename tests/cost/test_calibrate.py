"""What measurements teach the cost model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import Boundary, Calibration, Observation, Plan, SettingsError, Timing
from nereus.cost import calibrate
from nereus.cost.step import StepModel
from tests.cost.jobs import SMALL, WORKLOAD, cluster, colocated, grpo

TRUTH = {
    "prefill": 0.3, "decode": 0.3, "forward": 0.6, "backward": 0.5, "optimizer": 0.2,
    "tp": 0.1, "pp": 0.7, "dp": 0.9, "sync": 0.4, "dispatch": 0.05,
}  # fmt: skip


def observed(efficiency: float, ideal_s: float = 1.0) -> dict[str, Timing]:
    return {"generate:decode": Timing(ideal_s / efficiency, 1)}


def learn(calibration: Calibration, efficiencies: list[float]) -> Calibration:
    for efficiency in efficiencies:
        calibration = calibrate.update(calibration, {"generate:decode": 1.0}, observed(efficiency))
    return calibration


def measurement(model: StepModel, plan: Plan, extra: float = 1.0) -> Observation:
    """A step of a machine that reaches `TRUTH` in every class, and whose calls take `extra` times as long."""
    ideal = model.breakdown(plan)
    timings = {key: Timing(seconds / TRUTH[key.split(":")[1]], 1) for key, seconds in ideal.items()}
    call_s: dict[str, float] = {}
    for key, timing in timings.items():
        call = key.split(":")[0]
        call_s[call] = call_s.get(call, 0.0) + extra * timing.measured_s
    return Observation(Boundary(1, 1.0), frozenset({0, 1}), timings=timings, call_s=call_s)


def test_the_first_observation_replaces_the_start_value() -> None:
    known = learn(Calibration(), [0.07]).efficiency["decode"]
    assert known.value == pytest.approx(0.07)
    assert known.count == 1


def test_repeated_observations_narrow_the_variance() -> None:
    variances = [learn(Calibration(), [0.3] * count).efficiency["decode"].variance for count in (1, 3, 10)]
    assert variances == sorted(variances, reverse=True)
    assert variances[-1] < 0.01


def test_one_outlier_does_little() -> None:
    steady = [0.5] * 6
    assert learn(Calibration(), [*steady, 0.005]).efficiency["decode"].value == pytest.approx(0.5, rel=0.25)


def test_a_lasting_change_is_followed() -> None:
    assert learn(Calibration(), [0.5] * 6 + [0.2] * 12).efficiency["decode"].value == pytest.approx(0.2, rel=0.1)


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=20))
def test_an_efficiency_stays_within_what_was_seen(values: list[float]) -> None:
    known = learn(Calibration(), values).efficiency["decode"]
    assert min(values) * (1 - 1e-9) <= known.value <= max(values) * (1 + 1e-9)


def test_calls_of_a_class_count_by_their_seconds() -> None:
    ideal = {"a:forward": 9.0, "b:forward": 1.0, "c:forward": 5.0}
    seen = {"a:forward": Timing(18.0, 1), "b:forward": Timing(2.0, 1), "a:unknown": Timing(1.0, 1)}
    calibration = calibrate.update(Calibration(), ideal, seen)
    assert calibration.efficiency["forward"].value == pytest.approx(0.5)
    assert set(calibration.efficiency) == {"forward"}


def test_classes_timed_in_one_piece_share_its_time() -> None:
    ideal = {"generate:prefill": 1.0, "generate:decode": 3.0, "u:forward": 1.0, "u:backward": 2.0}
    seen = {"generate:decode": Timing(8.0, 1), "u:backward": Timing(12.0, 1)}
    found = {name: e.value for name, e in calibrate.update(Calibration(), ideal, seen).efficiency.items()}
    assert found == pytest.approx({"prefill": 0.5, "decode": 0.5, "forward": 0.25, "backward": 0.25})


def test_after_one_step_the_model_predicts_it() -> None:
    plan = colocated(grpo(SMALL), tp=2)
    model = StepModel(grpo(SMALL), WORKLOAD, cluster(2))
    seen = measurement(model, plan, extra=1.3)
    learnt = StepModel(grpo(SMALL), WORKLOAD, cluster(2), calibrate.learn(model, plan, seen))
    assert learnt.call_s(plan) == pytest.approx(seen.call_s)
    assert learnt.estimate(plan).uncertainty < model.estimate(plan).uncertainty


def test_what_one_plan_taught_helps_with_another() -> None:
    workflow, devices = grpo(SMALL), cluster(4)
    model = StepModel(workflow, WORKLOAD, devices)
    calibration = calibrate.learn(model, colocated(workflow), measurement(model, colocated(workflow)))
    other = colocated(workflow, dp=4)
    truth = sum(measurement(model, other).call_s.values())
    before, after = (StepModel(workflow, WORKLOAD, devices, c).estimate(other).step_s for c in (None, calibration))
    assert abs(after - truth) < 0.3 * abs(before - truth)


def test_a_pipeline_is_learnt_although_waiting_and_transfers_are_measured_together() -> None:
    plan, workflow = colocated(grpo(SMALL), pp=2), grpo(SMALL)
    model = StepModel(workflow, WORKLOAD, cluster(2))
    truth = measurement(model, plan)
    for _ in range(6):
        calibration = calibrate.learn(model, plan, truth)
        model = StepModel(workflow, WORKLOAD, cluster(2), calibration)
    assert model.call_s(plan) == pytest.approx(truth.call_s, rel=0.05)


def test_memory_goes_up_at_once_and_down_slowly() -> None:
    up = calibrate.update_memory(Calibration(), {0: 100, 1: 100}, {0: 130, 1: 90})
    assert up.memory_scale == pytest.approx(1.3)
    down = calibrate.update_memory(up, {0: 130}, {0: 100})
    assert 1.25 < down.memory_scale < 1.3


def test_memory_excess_is_charged_to_what_calls_add() -> None:
    """60 of 100 bytes are stored, so 110 measured means that calls add 50 instead of 40."""
    scaled = calibrate.update_memory(Calibration(), {0: 100}, {0: 110}, {0: 60})
    assert scaled.memory_scale == pytest.approx(1.25)


def test_memory_without_common_devices_teaches_nothing() -> None:
    assert calibrate.update_memory(Calibration(), {0: 100}, {1: 500}) == Calibration()


def test_what_transitions_take_beyond_their_bytes_is_overhead() -> None:
    calibration = Calibration()
    for ideal_s in (0.1, 0.2, 0.1, 0.3, 0.2, 0.1):
        calibration = calibrate.update_transition(calibration, ideal_s, 2.0 + ideal_s)
    assert calibration.transition_overhead_s == pytest.approx(2.0)
    assert calibration.transition_scale == 1.0


def test_transitions_faster_than_predicted_lower_the_scale() -> None:
    calibration = calibrate.update_transition(Calibration(), 10.0, 4.0)
    assert calibration.transition_scale == pytest.approx(0.4)
    assert calibration.transition_overhead_s == 0.0


def test_what_was_learnt_survives_a_file(tmp_path: Path) -> None:
    plan = colocated(grpo(SMALL), tp=2)
    model = StepModel(grpo(SMALL), WORKLOAD, cluster(2))
    calibration = calibrate.learn(model, plan, measurement(model, plan, extra=1.3))
    calibration = calibrate.update_transition(calibration, 1.0, 3.0)
    calibrate.save(calibration, tmp_path / "known.json")
    assert calibrate.load(tmp_path / "known.json") == calibration


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "an object"),
        ("[" * 100_000, "recursion"),
        ('{"efficiency": 3}', "efficiency: 3, expected an object"),
        ('{"memory_scale": 0}', "memory_scale 0.0 .* at least 0.0001"),
        ('{"memory_scale": true}', "memory_scale: true, expected a number"),
        ('{"transition_scale": 1e-320}', "transition_scale 1e-320 .* at least 1e-30"),
        ('{"transition_overhead_s": -1}', "transition_overhead_s -1.0 .* at least 0"),
        ('{"transition_overhead_s": Infinity}', "transition_overhead_s inf .* at most 1e.30"),
        ('{"memory_count": -1}', "memory_count -1 .* at least 0"),
        ('{"efficiency": {"decode": {"value": -0.5}}}', "efficiency.decode.value -0.5 .* at least 0.0001"),
        ('{"efficiency": {"decode": {"value": NaN}}}', "efficiency.decode.value nan .* at most 10000"),
        ('{"efficiency": {"decode": {"value": 1, "variance": NaN}}}', "efficiency.decode.variance nan"),
    ],
)
def test_a_file_that_is_no_calibration_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(SettingsError, match=rf"wrong\.json: not a calibration: .*{reason}"):
        calibrate.load(tmp_path / "wrong.json")
