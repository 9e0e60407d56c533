"""Plans beside the best: those that came close, and what another layout of the heaviest model-stages would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nereus.controller.changes import changes
from nereus.core import InfeasibleError, ModelStage, Pin, Plan, SettingsError
from nereus.core.sizes import show_seconds
from nereus.planning.judge import Scored
from nereus.planning.legal import legal_tp
from nereus.planning.problem import Problem
from nereus.planning.search import SearchResult, search
from nereus.report.views import PlanView

TIE = 1e-3
"""Plans that are slower by no more than this are as fast as the best."""
Row = tuple[str, str, str]
"""Seconds of a step, how much slower, what differs."""
CALLS = 3
"""Calls that are named for the difference of two plans."""
HEAVIEST = 2
"""Model-stages of which other layouts are tried."""


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A plan that came close. `slower` is relative to the best, `changes` says what differs from it, and where."""

    plan: Plan
    step_s: float
    slower: float
    changes: str
    where: tuple[ModelStage, ...]
    calls: tuple[tuple[str, float], ...] = ()
    """The calls whose seconds differ, by how much, the largest difference first."""
    asked: str = ""
    """What was fixed to find it."""

    @classmethod
    def of(cls, first: Scored, other: Scored, asked: str = "") -> RunnerUp:
        """One plan beside the best."""
        step_s, best, plan = other.estimate.step_s, first.plan, other.plan
        where = tuple(ms for ms in plan.model_stages if plan.of(ms) != best.of(ms))
        theirs, ours = other.estimate.call_s, first.estimate.call_s
        differ = {call: seconds - ours.get(call, 0.0) for call, seconds in theirs.items()}
        calls = tuple(sorted(differ.items(), key=lambda entry: -abs(entry[1])))
        slower = step_s / first.estimate.step_s - 1
        return cls(plan, step_s, slower, changes(best, plan), where, calls, asked)

    @property
    def why(self) -> str:
        """Where the time goes: the calls that differ most, as far as they matter to the step."""
        told = [(call, more) for call, more in self.calls if abs(more) > TIE * self.step_s]
        return ", ".join(f"{call} {'+' if more > 0 else '-'}{show_seconds(abs(more))} s" for call, more in told[:CALLS])


def runners_up(result: SearchResult | None) -> tuple[RunnerUp, ...]:
    """All that the search found but the best."""
    first, *others = result.best if result else (None,)
    return tuple(RunnerUp.of(first, other) for other in others if other is not None) if first is not None else ()


def alternatives(problem: Problem, first: Scored, view: PlanView) -> tuple[RunnerUp, ...]:
    """The best plans in which a model-stage that most of the critical path goes to has the next smaller or larger TP.

    `view` is that of the best plan, `first`. What is pinned stays so.
    """
    found = []
    for model_stage in _heaviest(first.plan, view)[:HEAVIEST]:
        pin = problem.capabilities.pin(model_stage)
        for tp in _next_tps(problem, model_stage, first.plan) if pin.tp is None else ():
            if other := _with_pin(problem, model_stage, replace(pin, tp=tp)):
                found.append(RunnerUp.of(first, other, f"{model_stage} tp{tp}"))
    return tuple(found)


def _heaviest(plan: Plan, view: PlanView) -> list[ModelStage]:
    seconds = {
        ms: sum(call.seconds for call in view.calls if call.critical and call.model_stage == str(ms))
        for ms in plan.model_stages
    }
    return sorted((ms for ms in seconds if seconds[ms] > 0), key=lambda ms: -seconds[ms])


def _next_tps(problem: Problem, model_stage: ModelStage, plan: Plan) -> list[int]:
    now, legal = plan.of(model_stage).candidate.layout.tp, legal_tp(problem, model_stage)
    return [*[tp for tp in legal if tp < now][-1:], *[tp for tp in legal if tp > now][:1]]


def _with_pin(problem: Problem, model_stage: ModelStage, pin: Pin) -> Scored | None:
    able = problem.capabilities
    try:
        return search(replace(problem, capabilities=replace(able, pins={**able.pins, model_stage: pin})), 1).best[0]
    except (InfeasibleError, SettingsError):
        return None


def rows(others: Sequence[RunnerUp]) -> Iterator[Row]:
    """Plans that came close: those as fast as the best are one row, and so are those that differ in the same places."""
    ties = [other for other in others if other.slower <= TIE]
    if ties:
        where = ", ".join(dict.fromkeys(str(ms) for other in ties for ms in other.where))
        what = f"{len(ties)} as fast, with other layouts of {where}: {ties[0].changes}"
        yield show_seconds(ties[0].step_s), f"<= {TIE:.1%}", what
    alike: dict[tuple[ModelStage, ...], list[RunnerUp]] = {}
    for other in others:
        if other.slower > TIE:
            alike.setdefault(other.where, []).append(other)
    for first, *more in alike.values():
        yield row(first, f"; {len(more)} more in the same model-stages" if more else "")


def row(other: RunnerUp, more: str = "") -> Row:
    """One plan."""
    parts = (f"with {other.asked}" if other.asked else "", other.why, other.changes + more)
    return show_seconds(other.step_s), f"{other.slower:.1%}", "; ".join(filter(None, parts))
