"""Operation classes: what a running job measures, what is believed of each before that, and what calls add to them."""

from __future__ import annotations

from nereus.core import Calibration, Efficiency

CLASSES = (
    "prefill", "decode", "forward", "backward", "optimizer",
    "tp", "pp", "dp", "cp", "ep", "offload", "sync", "dispatch",
)  # fmt: skip
"""Device work, then transfers, then what the coordinator takes."""

START_EFFICIENCY = 0.4
"""Share of the ideal rate that an unseen class is believed to reach: low, so that surprises are good ones."""
START_VARIANCE = 0.25


def efficiency(calibration: Calibration, name: str) -> Efficiency:
    """What is known about a class; conservative and uncertain before the first observation."""
    return calibration.efficiency.get(name, Efficiency(START_EFFICIENCY, 0, START_VARIANCE))


def residual(calibration: Calibration, call: str) -> Efficiency:
    """Measured over predicted seconds of a call, what the classes cannot explain; 1 before the first observation."""
    return calibration.efficiency.get(f"call:{call}", Efficiency(1.0, 0, 0.0))
