"""Expert groups in nodes: what the grid says of a row holds where the row is placed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nereus.core import Assignment, Capabilities, ModelSpec, Pin
from nereus.cost.rows import Rows
from nereus.planning.choices import Choices
from nereus.planning.grid import Grids
from nereus.planning.place import place
from nereus.planning.problem import Problem
from nereus.planning.select import fastest
from tests.cost.jobs import ACTOR, WORKLOAD, cluster, grpo

SPEC = ModelSpec("qwen3_moe", 4, 64, 4, 2, 16, 128, 96, experts=8, experts_per_token=2, expert_hidden=32)
WORK = replace(WORKLOAD, prompts=24, samples_per_prompt=2, mini_batch=24)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (9, 9), (12, 6, 3)])
def test_rows_of_the_grid_span_what_they_span_where_they_are_placed(sizes: tuple[int, ...]) -> None:
    able = Capabilities(expert_parallel=True, recompute=("none",), micro_batches=(1,), cp=(1, 2))
    grid = Grids(Problem(grpo(SPEC), WORK, cluster(sum(sizes)), able), sizes).of(ACTOR)
    node_of = np.repeat(np.arange(len(sizes)), sizes)
    starts = np.cumsum((0, *sizes))
    nodes = [tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
    inside = 0
    for row in range(len(grid.rows)):
        candidate = grid.candidate(row)
        units = place(candidate, nodes)
        placed = Rows.placed(Assignment(candidate, units), SPEC.layers, node_of[np.array(units).ravel()])
        assert placed.groups(0) == grid.rows.groups(row), candidate
        inside += candidate.ep > 1 and bool(placed.dp_spans[0]) and not placed.ep_spans[0]
    assert inside  # replicas in several nodes, and the experts of each in one


def test_a_searched_plan_with_experts_is_estimated_as_it_was_priced() -> None:
    pins = {ACTOR: Pin(tp=1, pp=2)}
    able = Capabilities(expert_parallel=True, recompute=("none",), micro_batches=(1,), pins=pins)
    problem = Problem(grpo(SPEC), WORK, cluster(16, 2 * 10**6, nodes=4), able)
    model, choices = problem.model(), Choices(problem, problem.model())
    arrangements = list(choices.arrangements())
    found = fastest(arrangements, problem.workflow, 8).found.values()
    assert found
    for each in found:
        plan = choices.plan(arrangements[each.arrangement], each)
        assert model.estimate(plan).step_s == pytest.approx(each.step_s, rel=1e-9)
        assert plan.of(ACTOR).candidate.ep > 1
