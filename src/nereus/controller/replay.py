"""What a brain decides from recorded facts: the same `tick`, on a job and an executor made of a record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from nereus.controller.loop import tick
from nereus.core import (
    Adapt,
    Boundary,
    ControllerState,
    Decision,
    EMUSet,
    Observation,
    Outcome,
    Plan,
    TransitionDAG,
    Trigger,
    expand,
)
from nereus.core.ports import Brain


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded tick."""

    boundary: Boundary
    seen: Observation
    triggers: tuple[Trigger, ...]
    decision: Decision
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class Replay:
    """The ticks that another (or the same) brain makes of recorded facts, and its last state."""

    entries: tuple[Entry, ...]
    state: ControllerState

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One per tick."""
        return tuple(entry.decision for entry in self.entries)


def replay(entries: Iterable[Entry], brain: Brain, state: ControllerState) -> Replay:
    """Feed recorded observations to `brain`, from `state` on.

    A transition that was recorded has its recorded outcome. Another one is taken to reach its goal in no time, from
    which no cost is learnt; the facts after it are still those of the recorded run: a replay compares decisions.
    """
    made: list[Entry] = []

    def note(
        boundary: Boundary, seen: Observation, triggers: Sequence[Trigger], decision: Decision, outcome: Outcome | None
    ) -> None:
        made.append(Entry(boundary, seen, tuple(triggers), decision, outcome))

    for entry in entries:
        recorded = _Recorded(entry)
        state = tick(state, entry.boundary, recorded, recorded, brain, note)
    return Replay(tuple(made), state)


@dataclass(frozen=True)
class _Recorded:
    """One recorded tick as a job and an executor."""

    entry: Entry

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}

    def boundaries(self) -> Iterator[Boundary]:
        yield self.entry.boundary

    def observe(self, boundary: Boundary) -> Observation:  # noqa: ARG002
        return self.entry.seen

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def adopt(self, units: EMUSet, plan: Plan | None = None) -> None:
        pass

    def restart(self, plan: Plan) -> EMUSet:
        return expand(plan)

    def execute(self, dag: TransitionDAG) -> Outcome:
        recorded = self.entry.decision
        if self.entry.outcome is not None and isinstance(recorded, Adapt) and recorded.proposal.dag == dag:
            return self.entry.outcome
        return Outcome(units=dag.goal, completed=True, seconds=0.0)
