"""The loop of Figure 1: at every safe boundary observe, replan, decide, act, record. Decides nothing itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from nereus.controller.measures import measures
from nereus.core import Adapt, Boundary, ControllerState, Decision, Keep, Observation, Outcome, Restart, Trigger
from nereus.core.ports import Brain, Executor, Job, Recorder

logger = logging.getLogger(__name__)

Record = Callable[[Boundary, Observation, Sequence[Trigger], Decision, Outcome | None], None]


def tick(
    state: ControllerState, boundary: Boundary, job: Job, executor: Executor, brain: Brain, record: Record
) -> ControllerState:
    """One boundary: facts in, at most one change of the job, one record out."""
    seen = job.observe(boundary)
    state, triggers = brain.take_in(state, seen)
    decision: Decision = Keep("nothing changed enough")
    outcome: Outcome | None = None
    if triggers:
        options = brain.propose(state)
        decision = brain.decide(state, triggers, options)
        state = brain.rebase(state, triggers)
    match decision:
        case Keep():
            pass
        case Adapt(proposal=proposal):
            with job.paused():
                outcome = executor.execute(proposal.dag)
                job.adopt(outcome.units, proposal.plan if outcome.completed else None)
            state = brain.settle(state, decision, outcome)
        case Restart(plan=plan):
            state = brain.begin(state, plan, job.restart(plan))
        case _:
            assert_never(decision)
    record(boundary, seen, triggers, decision, outcome)
    return state


def run(
    job: Job, executor: Executor, brain: Brain, recorders: Sequence[Recorder], state: ControllerState
) -> ControllerState:
    """Run the job to its end, adapting it on the way."""
    sinks = FanOut(tuple(recorders))
    sinks.begin(state)
    for boundary in job.boundaries():
        state = tick(state, boundary, job, executor, brain, sinks.record)
        if state.last is not None and state.last.step_s is not None:
            sinks.metrics(boundary.step, {**job.metrics, **measures(state)})
    return state


@dataclass(frozen=True)
class FanOut:
    """Every recorder gets everything; one that fails is reported and never stops the run."""

    recorders: tuple[Recorder, ...]

    def begin(self, state: ControllerState) -> None:
        """The state before the first boundary."""
        self._each(lambda recorder: recorder.begin(state))

    def record(
        self,
        boundary: Boundary,
        seen: Observation,
        triggers: Iterable[Trigger],
        decision: Decision,
        outcome: Outcome | None,
    ) -> None:
        """One tick."""
        facts = tuple(triggers)
        self._each(lambda recorder: recorder.record(boundary, seen, facts, decision, outcome))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """The metrics of one step."""
        self._each(lambda recorder: recorder.metrics(step, values))

    def _each(self, tell: Callable[[Recorder], None]) -> None:
        for recorder in self.recorders:
            try:
                tell(recorder)
            except Exception:  # a broken sink (full disk, lost server) must not end hours of training
                logger.exception("recorder %s failed; the run goes on without this entry", type(recorder).__name__)
