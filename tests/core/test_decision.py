"""Horizons, signals, payback arithmetic and errors."""

from __future__ import annotations

import pickle

import pytest

from nereus.core import (
    Calibration,
    Efficiency,
    Horizon,
    InfeasibleError,
    NereusError,
    OutOfMemoryError,
    Payback,
    SettingsError,
    Signal,
    WorkerLostError,
)


def test_a_horizon_is_one_step_until_an_interval_was_seen() -> None:
    assert Horizon().crossed(7) == Horizon(1.0, 7, 0)


def test_the_first_interval_is_taken_whole_and_later_ones_half() -> None:
    horizon = Horizon().crossed(3).crossed(13)
    assert (horizon.steps, horizon.intervals) == (10.0, 1)
    assert horizon.crossed(17).steps == 0.5 * 10 + 0.5 * 4


def test_crossing_twice_at_one_step_teaches_nothing() -> None:
    horizon = Horizon().crossed(3).crossed(13)
    assert horizon.crossed(13) == horizon


def test_a_falling_signal_triggers_as_a_rising_one_does() -> None:
    assert Signal("length", 100, 130, 0.3).crossed
    assert Signal("length", 100, 70, 0.3).crossed
    assert not Signal("length", 100, 129, 0.3).crossed
    assert not Signal("length", 0, 50, 0.3).crossed


def test_payback_is_equation_two() -> None:
    assert Payback(transition_s=10, saving_s=2, horizon_steps=10, margin=0.5).admitted
    assert not Payback(transition_s=10.1, saving_s=2, horizon_steps=10, margin=0.5).admitted
    assert Payback(10, 2, 10, 0.5).steps == 5


@pytest.mark.parametrize("saving_s", [0.0, -1.0])
def test_nothing_saved_never_pays_back(saving_s: float) -> None:
    payback = Payback(0.0, saving_s, 1000, 1.0)
    assert payback.steps == float("inf")
    assert not payback.admitted


def test_calibration_replaces_one_class_and_keeps_the_others() -> None:
    first = Calibration().with_efficiency("matmul", Efficiency(0.5, 1)).with_efficiency("copy", Efficiency(0.2, 1))
    second = first.with_efficiency("matmul", Efficiency(0.6, 2))
    assert (second.efficiency["matmul"].value, second.efficiency["copy"].value) == (0.6, 0.2)
    assert first.efficiency["matmul"].value == 0.5


def test_exit_codes_follow_the_contract() -> None:
    assert (NereusError.exit_code, SettingsError.exit_code, InfeasibleError.exit_code) == (1, 2, 3)
    assert InfeasibleError("none", {3: 10}).short_bytes == {3: 10}


@pytest.mark.parametrize("error", [OutOfMemoryError(2, 100, 50, 120, "kv cache"), WorkerLostError(4, "exit code -9")])
def test_errors_of_workers_survive_the_way_to_the_coordinator(error: OutOfMemoryError | WorkerLostError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.device) == (type(error), str(error), error.device)
