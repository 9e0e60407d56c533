"""The fastest plans that fit: exact over the arrangements of `choices.py`, then placed on devices.

Whatever the search says of a plan is asked again of the cost model: time from the placed plan, memory device by device.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereus.core import Assignment, Candidate, InfeasibleError, Layout, ModelStage, Plan, Rejection
from nereus.planning.choices import Choices
from nereus.planning.judge import Scored, misfit
from nereus.planning.leanest import leanest, nothing_fits
from nereus.planning.legal import check_pins
from nereus.planning.problem import Problem
from nereus.planning.select import fastest
from nereus.planning.tight import scarce, tight

TIE_DIGITS = 9
"""Plans whose times agree in so many digits are equally fast."""

Name = tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`best` fastest first, no two with the same layouts and replicas; `considered` candidates were priced.

    No plan of the space whose fullest pp ranks fit on one device together is below `bound_s`. It is None where the best
    plan is none of these: it fits only device by device, or is the current one. Others like it may be faster.
    """

    best: tuple[Scored, ...]
    refused: tuple[Rejection, ...]
    considered: int
    bound_s: float | None


def search(problem: Problem, k: int = 8) -> SearchResult:
    """The `k` fastest plans that fit; equally fast ones in favour of the current plan.

    Raises SettingsError for a pin that no plan can meet, InfeasibleError when nothing fits.
    """
    check_pins(problem)
    model = problem.model()
    choices = Choices(problem, model)
    arrangements = list(choices.arrangements())
    best = fastest(arrangements, problem.workflow, k)
    plans = [choices.plan(arrangements[each.arrangement], each) for each in best.found.values()]
    found = [Scored(plan, model.estimate(plan)) for plan in plans]
    exact = min(map(_digits, found), default=None)
    if scarce(arrangements):
        below_s = min(each.step_s for each in best.found.values()) if len(plans) >= k else float("inf")
        more = tight(problem, model, choices, max(k - len(plans), 1), below_s)
        found += [Scored(plan, model.estimate(plan)) for plan in more]
    offered: dict[Name, Scored] = {}
    current = problem.current
    if current is not None and misfit(problem, model, current) is None:
        offered[_name(current)] = Scored(current, model.estimate(current))
    for scored in found:
        known = offered.get(_name(scored.plan))
        if known is None or _digits(scored) < _digits(known):
            offered[_name(scored.plan)] = scored
    if not offered:
        lean = leanest(choices)
        reason = nothing_fits(problem, model, choices, lean)
        if reason is not None or lean is None:
            raise reason or InfeasibleError(f"no plan fits {len(problem.cluster.devices)} devices")
        offered[_name(lean)] = Scored(lean, model.estimate(lean))
    ranked = sorted(offered.values(), key=lambda scored: (_digits(scored), _changes(current, scored.plan)))[:k]
    bound_s = ranked[0].estimate.step_s if exact is not None and exact <= _digits(ranked[0]) else None
    return SearchResult(tuple(ranked), choices.refusals.all(), choices.considered, bound_s)


def _name(plan: Plan) -> Name:
    """What two plans must not have in common."""
    return tuple(Candidate(ms, c.layout, c.dp, cp=c.cp) for ms in plan.model_stages for c in (plan.of(ms).candidate,))


def _changes(current: Plan | None, plan: Plan) -> int:
    """Model-stages that would differ from the current plan."""
    now = {_placed(a) for a in current.assignments} if current else set()
    return sum(_placed(a) not in now for a in plan.assignments)


def _placed(assignment: Assignment) -> tuple[ModelStage, Layout, tuple[tuple[int, ...], ...]]:
    return (assignment.candidate.model_stage, assignment.candidate.layout, assignment.units)


def _digits(scored: Scored) -> float:
    return float(f"{scored.estimate.step_s:.{TIE_DIGITS}g}")
