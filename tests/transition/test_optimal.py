"""Orders and their bound against the shortest order of small transitions, found by trying them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nereus.core import EMUSet, InfeasibleError, Layout, ModelStage, Plan, TransitionDAG, expand
from nereus.transition import connect, stored_bytes
from nereus.transition.budget import Budget
from nereus.transition.decompose import decompose
from nereus.transition.site import Site
from tests.oracles.scip_orders import solve
from tests.oracles.shortest_orders import TooManyError, shortest_bytes
from tests.support.models import ACTOR, REWARD, ROLLOUT, assign, plan
from tests.support.small import full, three

SCHEMAS = three(rows=12)
GROUPS = 6
"""At most so many goal units are to be built."""
NEAR = 0.5 + 1e-6
"""Spans and bounds are rounded to bytes."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Two sets of units, by device the most that may be stored, and how much slower nodes of three are to reach."""

    start: EMUSet
    goal: EMUSet
    capacity: dict[int, int]
    far: int = 1

    @property
    def node_of(self) -> dict[int, int]:
        """Device → node."""
        return {device: device // 3 for unit in (*self.start, *self.goal) for device in unit.devices}

    def connected(self) -> TransitionDAG:
        """Our order."""
        return connect(self.start, self.goal, SCHEMAS, Budget(self.capacity), Site(self.node_of, far=self.far))

    def shortest(self, limit_bytes: float = float("inf")) -> float | None:
        """The span of the shortest order."""
        ends = (self.start, self.goal)
        return shortest_bytes(*ends, SCHEMAS, self.capacity, self.node_of, self.far, limit_bytes)


@st.composite
def plans(draw: st.DrawFn, model_stages: Sequence[ModelStage], devices: int) -> Plan:
    """One assignment a model-stage, on devices in any order."""
    chosen = []
    for ms in model_stages:
        degrees = [(tp, pp) for tp in range(1, 5) for pp in range(1, 5) if tp * pp <= min(devices, 8)]
        layout = Layout(*draw(st.sampled_from(degrees)))
        dp = draw(st.integers(1, min(GROUPS, devices // layout.size)))
        pool = draw(st.permutations(range(devices))) if draw(st.booleans()) else range(devices)
        chosen.append(assign(ms, layout, *pool[: dp * layout.size]))
    return plan(*chosen)


@st.composite
def problems(draw: st.DrawFn, limited: bool) -> Problem:
    """Small ones; if `limited`, devices hold little more than the fuller of both ends."""
    devices = draw(st.integers(2, 10 if limited else 16))
    model_stages = draw(st.lists(st.sampled_from(list(SCHEMAS)), min_size=1, max_size=3, unique=True))
    start, goal = (expand(draw(plans(model_stages, devices))) for _ in range(2))
    assume(0 < len(set(goal) - set(start)) <= GROUPS)
    capacity = {}
    if limited:
        slack = draw(st.sampled_from([100, 105, 125, 150]))
        capacity = {device: size * slack // 100 for device, size in full(start, goal, schemas=SCHEMAS).items()}
    return Problem(start, goal, capacity, draw(st.sampled_from([1, 1, 4])))


def solved(problem: Problem, limit_bytes: float = float("inf")) -> float | None:
    """The shortest span; what is too large to be searched is not looked at."""
    try:
        return problem.shortest(limit_bytes)
    except TooManyError:
        assume(False)
        raise


def problem(start: Plan, goal: Plan, capacity: dict[int, int] | None = None, far: int = 1) -> Problem:
    """One made by hand."""
    return Problem(expand(start), expand(goal), capacity or {}, far)


@pytest.mark.parametrize(("copies", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (7, 3)])
def test_the_oracle_knows_that_devices_at_most_double(copies: int, rounds: int) -> None:
    case = problem(plan(assign(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(1), *range(copies))))
    assert case.shortest() == rounds * stored_bytes(case.start, SCHEMAS)[0]


def test_the_oracle_knows_that_two_devices_send_three_copies_sooner_than_in_two_rounds() -> None:
    """In groups of any goal units, which no order of ours has: 1 + 3/2 rounds to five copies instead of 3."""
    case = problem(plan(assign(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(1), *range(5))))
    assert shortest_bytes(case.start, case.goal, SCHEMAS, {}, free=True) == 2.5 * stored_bytes(case.start, SCHEMAS)[0]


def test_the_oracle_sends_to_several_at_once_where_many_devices_have_it() -> None:
    case = problem(plan(assign(ACTOR, Layout(2, 2), 0, 1, 2, 3)), plan(assign(ACTOR, Layout(2), 4, 5, 6, 7)))
    assert case.shortest() == stored_bytes(case.goal, SCHEMAS)[4]


def test_the_oracle_waits_for_the_copy_whose_memory_it_needs() -> None:
    """Each of two copies has to move to the device of the other, and a third device holds one of them as well."""
    start = plan(assign(ROLLOUT, Layout(1), 0, 2), assign(REWARD, Layout(1), 1))
    goal = plan(assign(ROLLOUT, Layout(1), 1), assign(REWARD, Layout(1), 0))
    case = problem(start, goal)
    rollout, reward = (stored_bytes(case.start, SCHEMAS)[device] for device in (0, 1))
    full = {device: max(rollout, reward) for device in range(2)}
    assert problem(start, goal, full).shortest() == reward + rollout
    swapped = problem(plan(assign(ROLLOUT, Layout(1), 0), assign(REWARD, Layout(1), 1)), goal, full)
    assert swapped.shortest() is None


def test_the_oracle_crosses_nodes_once() -> None:
    case = problem(plan(assign(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(1), 0, 3, 4, 5)), far=4)
    assert case.shortest() == (4 + 1 + 1) * stored_bytes(case.start, SCHEMAS)[0]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.booleans().flatmap(problems))
def test_the_shortest_order_is_between_the_bound_and_ours(case: Problem) -> None:
    try:
        dag = case.connected()
    except InfeasibleError:
        return
    best = solved(case, dag.span_bytes + NEAR)
    assert best is not None, f"no order takes as little as {dag.span_bytes}"
    assert dag.bound_bytes <= best + NEAR
    assert not dag.certified or abs(best - dag.span_bytes) <= NEAR


@settings(max_examples=25, deadline=None)
@given(problems(limited=False))
def test_what_scip_proves_is_between_the_shortest_order_and_ours(case: Problem) -> None:
    """Two oracles against each other: SCIP is given the commit groups, the search finds its own."""
    pytest.importorskip("pyscipopt")
    ends = [(case.start.of(ms), case.goal.of(ms), SCHEMAS[ms]) for ms in case.goal.model_stages]
    groups = [decompose(*each) for each in ends if set(each[0]) != set(each[1])]
    ours = replace(case, far=1)
    span = ours.connected().span_bytes
    answer = solve(groups, {}, {}, 2.0 * span + 1, 20.0)
    best = solved(ours)
    assert best is not None
    assert answer.status == "optimal"
    assert best - NEAR <= answer.span_bytes <= span + NEAR


def test_a_group_that_lost_a_unit_to_read_receives_what_was_there() -> None:
    """Two replicas of the reward leave to make room; the third is then read for the shard that device 1 had as well."""
    start = plan(assign(REWARD, Layout(1), 0, 1, 2), assign(ACTOR, Layout(2), 2, 0))
    goal = plan(assign(REWARD, Layout(2), 1, 2), assign(ACTOR, Layout(2), 1, 0))
    ends = [stored_bytes(expand(each), SCHEMAS) for each in (start, goal)]
    case = problem(start, goal, {device: max(each.get(device, 0) for each in ends) for device in range(3)})
    assert case.connected().span_bytes == case.shortest()
