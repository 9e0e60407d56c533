"""Predictions and what they are calibrated with (paper §4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Estimate:
    """A plan's predicted step. `peak_bytes` by device; `uncertainty` is a relative standard deviation."""

    step_s: float
    call_s: Mapping[str, float]
    peak_bytes: Mapping[int, int]
    critical_path: tuple[str, ...]
    uncertainty: float
    limits: Mapping[int, str] = field(default_factory=dict)
    """Per device the call and term that make its peak, in words."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Achieved share of the ideal rate of an operation class, with the number of observations and their variance."""

    value: float
    count: int = 0
    variance: float = 0.25


@dataclass(frozen=True, slots=True)
class Calibration:
    """Efficiency by operation class, scale of predicted memory, scale and overhead of predicted transitions."""

    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)
    memory_scale: float = 1.0
    memory_count: int = 0
    transition_scale: float = 1.0
    transition_overhead_s: float = 0.0
    transition_count: int = 0

    def with_efficiency(self, name: str, value: Efficiency) -> Calibration:
        """The calibration with one class replaced."""
        return replace(self, efficiency={**self.efficiency, name: value})
