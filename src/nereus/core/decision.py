"""Proposals and decisions; a decision carries its arithmetic (paper §4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nereus.core.cluster import Cluster
from nereus.core.emu import EMUSet
from nereus.core.estimate import Calibration, Estimate
from nereus.core.observation import Horizon, Observation
from nereus.core.plan import Plan
from nereus.core.transition import TransitionDAG, TransitionEstimate
from nereus.core.workload import Workload


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan that fits, the way there, and what it would save per step against the current plan."""

    plan: Plan
    units: EMUSet
    dag: TransitionDAG
    estimate: Estimate
    transition: TransitionEstimate
    saving_s: float


@dataclass(frozen=True, slots=True)
class Payback:
    """Eq. (2): a transition pays back when `transition_s / saving_s <= margin * horizon_steps`."""

    transition_s: float
    saving_s: float
    horizon_steps: float
    margin: float

    @property
    def steps(self) -> float:
        """Steps until the savings repay the transition; infinite when nothing is saved."""
        return self.transition_s / self.saving_s if self.saving_s > 0 else float("inf")

    @property
    def admitted(self) -> bool:
        """Whether Eq. (2) holds."""
        return self.saving_s > 0 and self.steps <= self.margin * self.horizon_steps

    def describe(self) -> str:
        """The arithmetic in words."""
        costs = f"costs {self.transition_s:.2g} s"
        if self.saving_s <= 0:
            return f"saves nothing ({self.saving_s:+.2g} s/step), {costs}"
        within = f"pays back in {self.steps:.1f} of {self.horizon_steps:.1f} steps (margin {self.margin:g})"
        return f"saves {self.saving_s:.2g} s/step, {costs}, {within}"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A plan that was looked at and not taken, and why; it stands for `count` of them."""

    plan: str
    reason: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Options:
    """What a replan found: executable proposals, fastest first, and what was refused on the way.

    `current` is the current plan's estimate when it would still be valid (it fits and its devices stay).
    `fallback` is the fastest plan that fits though no transition leads to it.
    """

    proposals: tuple[Proposal, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    current: Estimate | None = None
    fallback: Plan | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """Nothing changes."""

    reason: str
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True)
class Adapt:
    """Change to the proposal's plan."""

    proposal: Proposal
    urgent: bool
    payback: Payback
    reason: str
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True)
class Restart:
    """No way leads from the live state to a plan that fits: start again from a checkpoint under `plan`."""

    plan: Plan
    reason: str
    rejected: tuple[Rejection, ...] = ()


Decision = Keep | Adapt | Restart


@dataclass(frozen=True, slots=True)
class Outcome:
    """What exists after a transition, complete or not, and what it took."""

    units: EMUSet
    completed: bool
    seconds: float
    received_bytes: Mapping[int, int] = field(default_factory=dict)
    sent_bytes: Mapping[int, int] = field(default_factory=dict)
    primitive_s: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ControllerState:
    """Everything the loop remembers; serialisable.

    `references` are signal values at the last replan. `pool` holds every device that may ever be there, `cluster` those
    that are ready now and stay.
    """

    plan: Plan
    units: EMUSet
    pool: Cluster
    cluster: Cluster
    workload: Workload
    calibration: Calibration = field(default_factory=Calibration)
    references: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    horizons: Mapping[str, Horizon] = field(default_factory=dict)
    estimate: Estimate | None = None
    last: Observation | None = None
    pending_transition_s: float | None = None
    """Predicted seconds of the transition whose first steps are still to be seen."""
    departing: frozenset[int] = frozenset()
