"""The candidates worth looking at for one model-stage alone (the latency-resource frontier of paper §4.2)."""

from __future__ import annotations

from nereus.core import Candidate, ModelStage, Rejection
from nereus.planning.legal import check_pins
from nereus.planning.options import OptionTable
from nereus.planning.place import pool_order
from nereus.planning.problem import Problem


def candidates(
    problem: Problem, model_stage: ModelStage, pool: int
) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
    """Legal, undominated candidates on the first `pool` devices, fastest first, and why others were refused.

    Raises SettingsError for a pin that no candidate can meet.
    """
    check_pins(problem)
    window = pool_order(problem.cluster, problem.current)[:pool]
    table = OptionTable(problem, problem.model(), window)
    found = tuple(option.candidate for option in table.frontier(model_stage, window))
    return found, table.refusals.all()
