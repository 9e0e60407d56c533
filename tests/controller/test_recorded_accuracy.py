"""How well the cost model predicts the recorded demo, learning as it goes: every step before it is seen."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median

import pytest

from nereus.controller.brain import Brain, _workload
from nereus.core import Adapt, Plan
from nereus.cost import calibrate
from nereus.cost.step import StepModel
from nereus.report.recorders.jsonl import Recording
from tests.controller.test_recorded_demo import brain, recording

__all__ = ["brain", "recording"]


def predictions(recording: Recording, brain: Brain) -> Iterator[tuple[bool, float]]:
    """(first step of a plan, predicted over measured seconds) from the second step on."""
    state = recording.state
    plan: Plan = state.plan
    calibration, workload, new = state.calibration, state.workload, False
    for entry in recording.entries:
        seen = entry.seen
        workload = _workload(workload, seen)
        model = StepModel(brain.workflow, workload, state.pool, calibration)
        if seen.step_s and calibration.efficiency:
            yield new, model.estimate(plan).step_s / seen.step_s
        calibration, new = calibrate.learn(model, plan, seen), False
        if isinstance(entry.decision, Adapt) and entry.outcome is not None and entry.outcome.completed:
            plan, new = entry.decision.proposal.plan, True


@pytest.fixture(scope="module")
def found(recording: Recording, brain: Brain) -> list[tuple[bool, float]]:
    return list(predictions(recording, brain))


def test_steps_are_predicted_within_a_tenth(found: list[tuple[bool, float]]) -> None:
    errors = [abs(ratio - 1) for _, ratio in found]
    assert mean(errors) < 0.1
    assert median(errors) < 0.08


def test_the_first_step_of_a_plan_never_run_before_is_predicted_too(found: list[tuple[bool, float]]) -> None:
    errors = [abs(ratio - 1) for new, ratio in found if new]
    assert len(errors) >= 2
    assert mean(errors) < 0.16
