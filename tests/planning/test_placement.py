"""Hosts that say who shares devices: no plan of the search departs from it, and none that keeps to it is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nereus.core import Capabilities, InfeasibleError, Plan, SettingsError, Stage
from nereus.planning.problem import Problem
from nereus.planning.search import search
from tests.cost.jobs import WORKLOAD, cluster, grpo, ppo


def keeps(plan: Plan, placement: str) -> bool:
    generating = {a.devices for a in plan.assignments if a.candidate.model_stage.stage is Stage.GENERATION}
    others = {a.devices for a in plan.assignments if a.candidate.model_stage.stage is not Stage.GENERATION}
    if placement == "colocated":
        return len(generating | others) == 1
    return len(others) == 1 and not any(one & other for one in generating for other in others)


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    placement=st.sampled_from(["colocated", "disaggregated"]),
    devices=st.sampled_from([2, 4]),
    nodes=st.sampled_from([1, 2]),
    memory=st.floats(6.0, 40.0),
    critic=st.booleans(),
)
def test_plans_keep_to_the_placement_and_miss_no_faster_one(
    placement: str, devices: int, nodes: int, memory: float, critic: bool
) -> None:
    pool = cluster(devices, int(memory * 1e6), nodes)
    free = Problem(ppo() if critic else grpo(), WORKLOAD, pool, Capabilities())
    try:
        every = search(free, 20)
    except InfeasibleError:
        return
    allowed = [scored.estimate.step_s for scored in every.best if keeps(scored.plan, placement)]
    try:
        found = search(replace(free, capabilities=Capabilities(placement=placement)), 8)
    except InfeasibleError:
        assert not allowed
        return
    assert all(keeps(scored.plan, placement) for scored in found.best)
    step_s = found.best[0].estimate.step_s
    assert step_s >= every.best[0].estimate.step_s * (1 - 1e-9)
    assert step_s <= min(allowed, default=float("inf")) * (1 + 1e-9)


def test_unknown_placements_are_refused() -> None:
    with pytest.raises(SettingsError, match="placement 'apart', valid: any, colocated, disaggregated"):
        Capabilities(placement="apart")
