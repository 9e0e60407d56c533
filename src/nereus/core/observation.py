"""What the monitor saw, and what it made of it (paper §4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nereus.core.workload import Lengths


@dataclass(frozen=True, slots=True)
class Boundary:
    """A point where the job may be changed: the end of RL step `step` (0: before the first)."""

    step: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Time that the busiest device of a call spent in one operation class since the last boundary.

    Compute classes are CPU seconds divided by the device's speed (device seconds on a GPU), links wall seconds.
    """

    measured_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Observation:
    """Facts only. `peaks` are measured peak bytes by device since the last boundary; `devices` are ready ones.

    `timings` is keyed `call:class`, e.g. `generate:decode`; the classes are `cost.operations.CLASSES`.
    """

    boundary: Boundary
    devices: frozenset[int]
    response: Lengths | None = None
    prompt: Lengths | None = None
    peaks: Mapping[int, int] = field(default_factory=dict)
    timings: Mapping[str, Timing] = field(default_factory=dict)
    call_s: Mapping[str, float] = field(default_factory=dict)
    step_s: float | None = None
    out_of_memory: str | None = None
    """The message of an out-of-memory event that ended the step early, if one did."""
    departing: frozenset[int] = frozenset()
    """Devices still usable now that will be gone; they are to be drained."""
    update_tokens: int = 0
    """Response tokens trained on since the last boundary."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A drifting quantity: its value at the last replan, its value now, the relative change that triggers."""

    name: str
    reference: float
    value: float
    threshold: float

    @property
    def change(self) -> float:
        """Relative change against the reference; falls count as rises do."""
        return 0.0 if self.reference == 0 else abs(self.value - self.reference) / abs(self.reference)

    @property
    def crossed(self) -> bool:
        """Whether the change reaches the threshold."""
        return self.change >= self.threshold


@dataclass(frozen=True, slots=True)
class Trigger:
    """A reason to replan. `urgent`: the current plan no longer fits or its devices go."""

    signal: str
    urgent: bool
    why: str


@dataclass(frozen=True, slots=True)
class Horizon:
    """Steps between crossings of one signal: exponential moving average, weight 0.5; 1 before the first interval."""

    steps: float = 1.0
    last_step: int | None = None
    intervals: int = 0

    def crossed(self, step: int) -> Horizon:
        """The horizon after a crossing at `step`."""
        if self.last_step is None or step <= self.last_step:
            return Horizon(self.steps, step, self.intervals)
        interval = float(step - self.last_step)
        steps = interval if self.intervals == 0 else 0.5 * self.steps + 0.5 * interval
        return Horizon(max(1.0, steps), step, self.intervals + 1)
