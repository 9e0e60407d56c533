"""Plans that fit device by device although the fullest pp ranks of their model-stages together would not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nereus.core import Plan
from nereus.cost.step import StepModel
from nereus.planning.choices import Arrangement, Choices, width
from nereus.planning.judge import misfit
from nereus.planning.leanest import could_fit, loose
from nereus.planning.problem import Problem
from nereus.planning.select import fastest

TRIED = 128
"""So many of either kind are judged."""


def scarce(arrangements: Sequence[Arrangement]) -> bool:
    """Whether it takes more than half of the pool to hold the leanest row of every model-stage, all in turns."""
    return not any(_roomy(each) for each in arrangements if width(each.program) == 1 and each.program.colocated)


def _roomy(each: Arrangement) -> bool:
    stored = added = 0.0
    for table in each.tables:
        total = np.where(2 * table.slots <= each.slots, table.resident + table.transient, np.inf)
        leanest = int(total.argmin()) if len(table) else 0
        if not len(table) or not np.isfinite(total[leanest]):
            return False
        stored, added = stored + float(table.resident[leanest]), max(added, float(table.transient[leanest]))
    return stored + added <= each.room[0]


def tight(problem: Problem, model: StepModel, everything: Choices, k: int, below_s: float) -> list[Plan]:
    """Up to `k` of them below some seconds, fastest first: those that may fit are judged device by device."""
    found = []
    for choices, arrangements in loose(everything):
        if could_fit(arrangements) and _fastest_s(problem, arrangements) < below_s:
            best = fastest(arrangements, problem.workflow, TRIED).found.values()
            found += [(each.step_s, choices, arrangements[each.arrangement], each) for each in best]
    plans: list[Plan] = []
    for step_s, choices, arrangement, each in sorted(found, key=lambda one: one[0]):
        if len(plans) >= k or step_s >= below_s:
            break
        plan = choices.plan(arrangement, each)
        if misfit(problem, model, plan) is None:
            plans.append(plan)
    return plans


def surely(problem: Problem) -> bool:
    """Whether a plan fits even if the fullest pp ranks of its model-stages lie on one device, by bytes alone."""
    return could_fit(list(Choices(problem, problem.model()).arrangements()))


def _fastest_s(problem: Problem, arrangements: Sequence[Arrangement]) -> float:
    return min((each.step_s for each in fastest(arrangements, problem.workflow, 1).found.values()), default=np.inf)
