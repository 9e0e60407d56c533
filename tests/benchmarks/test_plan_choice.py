"""The set of plans that the planner's choice is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

import pytest
from benchmarks.plan_choice import CAPACITY, DEVICES, SPEED, every_plan, identity, job_config

from nereus.clusters.local import Local
from nereus.core import Plan
from nereus.planning.problem import Problem
from nereus.planning.search import search
from tests.support.jobs import Degrees, make_models, plan_of


def plan(generation: Degrees, training: Degrees) -> Plan:
    degrees: Mapping[str, Degrees] = {"actor/generation": generation, "actor/training": training}
    return plan_of(degrees)


def test_names_of_devices_and_order_of_replicas_do_not_make_another_plan() -> None:
    first = identity(plan((1, 1, 2, (0, 1)), (2, 2, 1, (0, 1, 2, 3))))
    for a, b, c, d in permutations(range(4)):
        assert identity(plan((1, 1, 2, (b, a)), (2, 2, 1, (a, b, c, d)))) == first


@pytest.mark.parametrize(
    "other",
    [
        plan((1, 1, 2, (0, 2)), (2, 2, 1, (0, 1, 2, 3))),  # replicas beside different pp ranks
        plan((1, 1, 2, (0, 1)), (2, 1, 2, (0, 1, 2, 3))),
        plan((2, 1, 1, (0, 1)), (2, 2, 1, (0, 1, 2, 3))),
        plan((1, 1, 1, (0,)), (2, 2, 1, (0, 1, 2, 3))),
    ],
)
def test_layouts_and_shared_devices_do(other: Plan) -> None:
    assert identity(other) != identity(plan((1, 1, 2, (0, 1)), (2, 2, 1, (0, 1, 2, 3))))


def test_between_30_and_100_plans_are_valid_and_the_planners_choice_is_one_of_them(tmp_path: Path) -> None:
    config, source = job_config(make_models(tmp_path)), Local(DEVICES, CAPACITY, SPEED, cores=2)
    workflow = config.algorithm.workflow(config.specs)
    problem = Problem(workflow, config.workload, source.cluster(), config.capabilities)
    plans = every_plan(problem)
    assert 30 <= len(plans) <= 100
    assert len({identity(each) for each in plans}) == len(plans)
    assert identity(search(problem, k=1).best[0].plan) in {identity(each) for each in plans}
