"""Orders where memory is short give up no more than they must: against all orders, tried one by one."""

from __future__ import annotations

from importlib import import_module

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nereus.core import Assignment, EMUSet, InfeasibleError, Layout, TransitionDAG, expand
from nereus.transition import Budget, connect, pair_bytes
from nereus.transition.alone import Alone
from nereus.transition.cheapest import cheapest
from nereus.transition.crowd import Crowd
from nereus.transition.deadlock import deadlocked
from tests.oracles.cheapest_orders import TooManyError, least_moved
from tests.oracles.cut import lacks_bytes
from tests.support.models import ACTOR, REWARD, assign, plan
from tests.support.small import SCHEMAS, full, random_case

TRIES = 4_000


def moved(dag: TransitionDAG) -> int:
    """Bytes that arrive anywhere."""
    return sum(sum(each.values()) for each in pair_bytes(dag, SCHEMAS).values())


def all_read(start: EMUSet, goal: EMUSet) -> int:
    """Bytes that arrive when every device that holds something reads it."""
    return sum(
        lacks_bytes(SCHEMAS[unit.model_stage], start.of(unit.model_stage), unit, device)
        for unit in set(goal) - set(start)
        for device in unit.devices
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
@example(6)  # giving up one unit of several instead of all but one
def test_no_order_loses_less_than_the_cheapest(seed: int) -> None:
    start, goal, capacity = random_case(seed)
    try:
        least = least_moved(start, goal, SCHEMAS, capacity, most_states=2_000)
    except TooManyError:
        return
    crowd = Crowd(start, goal, SCHEMAS, capacity, {})
    found = cheapest(crowd, TRIES)
    assert least is None or not deadlocked(crowd)
    if least is None:
        assert found is None
        return
    assert found is not None
    assert found.least
    assert all_read(start, goal) + found.lost_bytes == least[1]
    assert Alone(crowd).lost((1 << len(crowd.old)) - 1, 0) <= found.lost_bytes


@pytest.mark.parametrize("seed", [6, 30, 123, 126])
def test_what_the_search_leads_to_moves_what_it_says(seed: int) -> None:
    """Cases in which the greedy order ends."""
    start, goal, capacity = random_case(seed)
    try:
        dag = connect(start, goal, SCHEMAS, Budget(capacity))
    except InfeasibleError:
        assert least_moved(start, goal, SCHEMAS, capacity) is None
        return
    least = least_moved(start, goal, SCHEMAS, capacity)
    assert least is not None
    assert moved(dag) >= least[1]


@pytest.mark.parametrize("seed", [1050, 1911, 3011, 7657])
def test_what_the_search_had_no_time_to_prove_is_not_called_the_least(seed: int) -> None:
    start, goal, capacity = random_case(seed)
    crowd = Crowd(start, goal, SCHEMAS, capacity, {})
    for tries in (10, 20, 40):
        found = cheapest(crowd, tries)
        if found is not None:
            best = cheapest(crowd, TRIES)
            assert best is not None
            assert best.lost_bytes <= found.lost_bytes
            assert not found.least or found.lost_bytes == best.lost_bytes


@pytest.mark.parametrize("seed", [30, 126, 2635, 4693])
def test_the_order_that_gives_up_least_is_taken_for_a_larger_share_of_bytes_than_of_time(seed: int) -> None:
    start, goal, capacity = random_case(seed)
    dag = connect(start, goal, SCHEMAS, Budget(capacity))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("nereus.transition.compile"), "spared", lambda found, *_: found)
        first = connect(start, goal, SCHEMAS, Budget(capacity))
    least = least_moved(start, goal, SCHEMAS, capacity)
    assert least is not None
    assert least[1] <= moved(dag) < moved(first)
    assert moved(dag) * dag.span_bytes <= moved(first) * first.span_bytes


ON_ONE, ON_TWO = Layout(1, 1), Layout(2, 1)
SWAP = [assign(ACTOR, ON_ONE, 0), assign(REWARD, ON_ONE, 1)], [assign(ACTOR, ON_ONE, 1), assign(REWARD, ON_ONE, 0)]
REPLICAS = [assign(ACTOR, ON_ONE, 0, 1), assign(REWARD, ON_ONE, 2)]


@pytest.mark.parametrize(
    ("ends", "waits"),
    [
        (SWAP, True),
        ((REPLICAS, [assign(ACTOR, ON_ONE, 2), assign(REWARD, ON_TWO, 0, 1)]), True),  # whichever replica stays
        ((REPLICAS, [assign(ACTOR, ON_ONE, 2), assign(REWARD, ON_ONE, 0)]), False),  # the other one stays
        ((SWAP[0], [assign(ACTOR, ON_ONE, 2), assign(REWARD, ON_ONE, 0)]), False),
    ],
)
def test_model_stages_that_wait_for_each_other_are_told_without_an_order(
    ends: tuple[list[Assignment], list[Assignment]], waits: bool
) -> None:
    start, goal = (expand(plan(*end)) for end in ends)
    capacity = full(start, goal)
    assert deadlocked(Crowd(start, goal, SCHEMAS, capacity, {})) == waits
    assert (least_moved(start, goal, SCHEMAS, capacity) is None) == waits
    roomy = {device: 2 * size for device, size in capacity.items()}
    assert not deadlocked(Crowd(start, goal, SCHEMAS, roomy, {}))
