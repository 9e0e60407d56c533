"""What is believed of a class of operations before anything was measured, and what is known afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from nereus.core import Calibration, DeviceKind, Efficiency, Link
from nereus.cost.kernels import Rates
from nereus.cost.operations import START_EFFICIENCY, START_VARIANCE
from nereus.cost.site import KNOWN_VARIANCE, Site

LINK = Link(1e9, 1e-5)


def site(known: Calibration | None = None, *constants: dict[str, float]) -> Site:
    kinds = tuple(
        DeviceKind(f"kind {index}", 10**9, {"bf16": 1e12}, 1e11, host_bytes_per_s=1e9 * (index + 1), constants=each)
        for index, each in enumerate(constants or ({},))
    )
    return Site(Rates.slowest(kinds, "bf16"), LINK, LINK, known or Calibration(), kinds)


def test_a_device_nobody_measured_is_believed_slow_and_uncertain() -> None:
    assert site().efficiency("forward") == Efficiency(START_EFFICIENCY, 0, START_VARIANCE)
    assert site(None, {"context.bytes": 1e8}).efficiency("forward").value == START_EFFICIENCY


def test_fitted_constants_say_themselves_how_far_kernels_stay_from_the_peaks() -> None:
    assert site(None, {"gemm.share": 0.8}).efficiency("forward") == Efficiency(1.0, 0, KNOWN_VARIANCE)


def test_constants_of_a_relative_are_as_uncertain_as_they_say() -> None:
    relative = {"gemm.share": 0.8, "uncertainty": 0.3}
    assert site(None, relative).efficiency("forward").variance == pytest.approx(0.09)
    assert site(None, {"gemm.share": 0.8}, relative).efficiency("forward").variance == pytest.approx(0.09)


def test_what_was_observed_counts_more_than_any_constant() -> None:
    learnt = Calibration({"forward": Efficiency(0.7, 3, 0.002)})
    assert site(learnt, {"gemm.share": 0.8}).efficiency("forward") == learnt.efficiency["forward"]


def test_predicted_seconds_are_ideal_ones_over_efficiencies() -> None:
    learnt = Calibration({"forward": Efficiency(0.5, 1, 0.0), "tp": Efficiency(0.25, 1, 0.0)})
    ideal = {"forward": np.array([3.0, 0.0]), "tp": np.array([1.0, 2.0])}
    assert site(learnt).weigh(ideal).tolist() == [3.0 / 0.5 + 1.0 / 0.25, 2.0 / 0.25]


def test_the_way_to_host_memory_is_that_of_the_slowest_device() -> None:
    assert site(None, {}, {}).host_bytes_per_s == 1e9
