"""The planner's whole answer to one question: the best plan, what came close, the plan one has beside it, advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nereus.controller.changes import changes
from nereus.core import Capabilities, InfeasibleError, ModelStage, NereusError, Pin, Plan
from nereus.cost.step import StepModel
from nereus.planning import advice
from nereus.planning.advice import Advice
from nereus.planning.judge import Scored, misfit
from nereus.planning.problem import Problem
from nereus.planning.search import SearchResult, search
from nereus.report import close
from nereus.report.close import RunnerUp
from nereus.report.views import PlanView

Pins = Mapping[ModelStage, Pin]
IMPORTED, PINNED = "imported configuration", "pinned degrees"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plan that the asker fixed (`own`) beside the one the planner would choose (`other`).

    `own` is "pinned degrees" or "imported configuration"; `view` is None when no such plan can be placed at all.
    """

    own: str
    fits: bool
    reason: str
    """Why it does not fit: device, bytes, call, term."""
    view: PlanView | None
    other: PlanView | None

    @property
    def slower(self) -> float | None:
        """How much longer its step is, relative to the other."""
        if self.view is None or self.other is None:
            return None
        return self.view.step_s / self.other.step_s - 1

    @property
    def tight(self) -> bool:
        """Whether it lacks no more than the headroom: it may run, but a plan of ours leaves that free."""
        return (
            not self.fits
            and self.view is not None
            and all(row.peak_bytes <= row.capacity_bytes for row in self.view.memory)
        )

    @property
    def verdict(self) -> str:
        """In words."""
        if self.fits:
            return "fits"
        return "fits, but not with the headroom that is kept free" if self.tight else "does not fit"

    @property
    def better(self) -> PlanView | None:
        """The own plan where it fits and no faster one was found: it may lie outside what the search chooses from."""
        own_is = self.fits and self.view is not None and (self.slower is None or self.slower <= 0)
        return self.view if own_is else self.other

    def shows(self, best: PlanView) -> bool:
        """Whether the best plan is the one that a verdict already shows in full."""
        return self.own == IMPORTED and best is self.view

    @property
    def calls(self) -> tuple[tuple[str, float, float], ...]:
        """(call, own seconds, other seconds), the largest difference first."""
        if self.view is None or self.other is None:
            return ()
        theirs = {call.call: call.seconds for call in self.other.calls}
        rows = ((call.call, call.seconds, theirs.get(call.call, 0.0)) for call in self.view.calls)
        return tuple(sorted(rows, key=lambda row: -abs(row[1] - row[2])))

    @property
    def changes(self) -> str:
        """From the own layouts to the other's."""
        return changes(self.view.plan, self.other.plan) if self.view and self.other else ""


@dataclass(frozen=True, slots=True)
class Answer:
    """`best` is None when nothing fits; then `shortage` says why and `advice` what would help.

    `result` is None when the search found nothing; an imported configuration may still fit, and is then the best.
    """

    problem: Problem
    best: PlanView | None
    result: SearchResult | None
    shortage: str
    runners_up: tuple[RunnerUp, ...]
    comparison: Comparison | None
    advice: tuple[Advice, ...]
    alternatives: tuple[RunnerUp, ...] = ()
    """The best plans with another layout of the heaviest model-stages."""


def answer(
    problem: Problem,
    *,
    widest: Capabilities,
    own: Plan | None = None,
    unplaced: str = "",
    top: int = 8,
    advise: bool = True,
    tell: Callable[[str], object] = str,
) -> Answer:
    """Search, judge the plan the asker has, and look for what would help.

    `widest` is what the job's host could be told to do, its pins what the host itself fixes; `unplaced` says why there
    is no `own` plan where there should be one; `tell` hears what is being looked for. Raises SettingsError for pins
    that no plan can meet.
    """
    model = problem.model()
    try:
        result, shortage, short_bytes = search(problem, top), "", {}
    except InfeasibleError as error:
        result, shortage, short_bytes = None, str(error), error.short_bytes
    best = PlanView.of(problem, model, result.best[0]) if result else None
    tell("looking for plans beside it")
    others = close.alternatives(problem, result.best[0], best) if result and best and advise else ()
    if own is None and not unplaced:
        comparison = _pinned(problem, model, best, shortage, widest.pins)
    else:
        comparison = _imported(problem, model, own, unplaced, best)
        best = comparison.better
    found: tuple[Advice, ...] = ()
    if advise:
        tell("nothing fits: looking for the smallest change that helps" if best is None else "looking for what helps")
        found = advice.gains(problem, best.step_s, widest) if best else advice.remedies(problem, widest, short_bytes)
    return Answer(problem, best, result, shortage, close.runners_up(result), comparison, found, others)


def _pinned(problem: Problem, model: StepModel, best: PlanView | None, shortage: str, fixed: Pins) -> Comparison | None:
    """The best plan with the pins beside the best without."""
    if problem.capabilities.pins == fixed:
        return None
    free = replace(problem, capabilities=replace(problem.capabilities, pins=fixed))
    try:
        other = PlanView.of(free, model, search(free, 1).best[0])
    except InfeasibleError:
        other = None
    return Comparison(PINNED, best is not None, shortage, best, other)


def _imported(problem: Problem, model: StepModel, own: Plan | None, unplaced: str, best: PlanView | None) -> Comparison:
    """A plan that was brought along, or why there is none, beside the best one."""
    if own is None:
        return Comparison(IMPORTED, False, unplaced, None, best)
    reason = misfit(problem, model, own)
    try:
        view = PlanView.of(problem, model, Scored(own, model.estimate(own)))
    except (NereusError, KeyError):  # devices or model-stages that the problem does not have
        view = None
    return Comparison(IMPORTED, reason is None, str(reason or ""), view, best)
