"""Orders where memory is short give up no more than they must: against all orders, tried one by one."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nereus.core import EMUSet, InfeasibleError, TransitionDAG
from nereus.transition import Budget, connect, pair_bytes
from nereus.transition.alone import Alone
from nereus.transition.cheapest import cheapest
from nereus.transition.crowd import Crowd
from nereus.transition.deadlock import deadlocked
from tests.oracles.cheapest_orders import TooManyError, least_moved
from tests.oracles.cut import lacks_bytes
from tests.support.small import SCHEMAS, random_case

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
