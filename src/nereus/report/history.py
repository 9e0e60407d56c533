"""A recorder that keeps a run in memory, for the closing summary and the timeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from nereus.controller.replay import Entry
from nereus.core import Adapt, Boundary, ControllerState, Decision, Observation, Outcome, Plan, Restart, Trigger


@dataclass(frozen=True, slots=True)
class Tick:
    """A recorded tick and the plan under which its step ran."""

    entry: Entry
    plan: Plan


@dataclass
class History:
    """Everything that was recorded, in order."""

    start: ControllerState | None = None
    plan: Plan | None = None
    ticks: list[Tick] = field(default_factory=list)
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def begin(self, state: ControllerState) -> None:
        """The state before the first boundary."""
        self.start = state
        self.plan = state.plan

    def record(
        self,
        boundary: Boundary,
        seen: Observation,
        triggers: Collection[Trigger],
        decision: Decision,
        outcome: Outcome | None,
    ) -> None:
        """One tick."""
        if self.plan is None:
            return
        self.ticks.append(Tick(Entry(boundary, seen, tuple(triggers), decision, outcome), self.plan))
        match decision:
            case Adapt(proposal=proposal) if outcome is not None and outcome.completed:
                self.plan = proposal.plan
            case Restart(plan=plan):
                self.plan = plan

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One step's values, by metric."""
        for name, value in values.items():
            self.series.setdefault(name, []).append((step, value))
