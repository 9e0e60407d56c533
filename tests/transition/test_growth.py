"""How many rounds new replicas take, against every way to let old units leave, and against the shortest order."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import Layout, expand
from nereus.transition import connect, stored_bytes
from nereus.transition.budget import Budget
from nereus.transition.growth import Gate, Growth, Swap
from tests.oracles.shortest_orders import shortest_bytes
from tests.support.models import ACTOR, REWARD, ROLLOUT, assign, plan
from tests.support.small import SCHEMAS, full

swaps_ = st.lists(st.builds(Swap, st.integers(1, 4), st.integers(1, 4), st.just(0)), max_size=3)


def fewest(held: int, beside: int, swaps: list[Swap]) -> int | None:
    """Rounds by going through all choices of which swaps' units have left when; None: somebody has to leave first."""
    wanted = beside + sum(swap.wanted for swap in swaps)
    states, rounds = {((False,) * len(swaps), 0)}, 0
    while not any(made == wanted for _, made in states):
        after = set()
        for gone, made in states:
            for more in product((False, True), repeat=len(swaps)):
                left = tuple(a or b for a, b in zip(gone, more, strict=True))
                there = held - sum(swap.held for swap, away in zip(swaps, left, strict=True) if away) + made
                room = beside + sum(swap.wanted for swap, away in zip(swaps, left, strict=True) if away)
                if there > 0:
                    after.add((left, max(made, min(made + there, room))))
        if after <= states:
            return None
        states, rounds = states | after, rounds + 1
    return rounds


@given(st.integers(0, 3), st.integers(0, 12), swaps_)
def test_no_way_to_let_units_leave_takes_fewer_rounds(permanent: int, beside: int, swaps: list[Swap]) -> None:
    held = permanent + sum(swap.held for swap in swaps)
    wanted = beside + sum(swap.wanted for swap in swaps)
    best = fewest(held, beside, swaps) if held and wanted else None
    if best is None:
        return
    assert Growth(held, wanted, Counter(swaps)).rounds(Gate()) <= best
    if not swaps:
        assert best == ceil(log2((held + wanted) / held) - 1e-9) == Growth(held, wanted, Counter()).rounds(Gate())


@pytest.mark.parametrize(
    ("growth", "gate", "rounds"),
    [
        (Growth(8, 24, Counter([Swap(8, 8, 0)])), Gate(), 3),  # of 8 devices come 8, then 8 more or 8 in their place
        (Growth(24, 24, Counter([Swap(8, 8, 2)] * 3), whole=True), Gate(), 3),  # 8 of 16, 16 of 8 + 8, and the rest
        (Growth(24, 24, Counter([Swap(8, 8, 2)] * 3)), Gate(), 2),  # were they built from six devices each
        (Growth(4, 8, Counter()), Gate(earliest=1.5, late=6), 2.5),  # six have room later
        (Growth(16, 8, Counter([Swap(4, 4, 0)] * 2)), Gate(0.25, 0, 1.2, 8), 2),  # 8 have left for another, 8 swap
        (Growth(16, 8, Counter([Swap(4, 4, 0)] * 2)), Gate(0.25, 0, 0.9, 8), 1),  # that may follow here
    ],
)
def test_rounds_counted_by_hand(growth: Growth, gate: Gate, rounds: float) -> None:
    assert growth.rounds(gate) == rounds


def test_a_unit_that_has_to_leave_for_replicas_of_its_own_sends_in_no_later_round() -> None:
    """2 devices of one unit, replicas on them and four others: doubling alone would take 2 rounds."""
    start, goal = (expand(plan(assign(ROLLOUT, layout, *devices))) for layout, devices in
                   ((Layout(2), range(2)), (Layout(1), range(6))))  # fmt: skip
    capacity = full(start, goal)
    dag = connect(start, goal, SCHEMAS, Budget(capacity))
    assert dag.certified
    assert dag.span_bytes == shortest_bytes(start, goal, SCHEMAS, capacity) == 3 * stored_bytes(goal, SCHEMAS)[0]


def test_what_waits_for_another_model_stage_is_late_for_the_first_round() -> None:
    """The reward's only copy leaves device 2 when device 3 has it; of the four rollouts there are two by then."""
    start = expand(plan(assign(ROLLOUT, Layout(1), 0, 1), assign(REWARD, Layout(1), 2)))
    goal = expand(plan(assign(ROLLOUT, Layout(1), 0, 1, 2), assign(REWARD, Layout(1), 3)))
    dag = connect(start, goal, SCHEMAS, Budget(full(start, goal)))
    sizes = [stored_bytes(goal, SCHEMAS)[device] for device in (2, 3)]
    assert dag.certified
    assert dag.span_bytes == sum(sizes)


def test_units_that_take_over_from_one_are_built_together_from_fewer_senders() -> None:
    """Six devices from four in one round and a half: a sender need not make whole rounds of what it sends."""
    start = expand(plan(assign(ACTOR, Layout(2, 2), 3, 1, 9, 6, 8, 4, 0, 5)))
    goal = expand(plan(assign(ACTOR, Layout(1, 2), 7, 6, 1, 2, 9, 3)))
    capacity = {device: size * 105 // 100 for device, size in full(start, goal).items()}
    dag = connect(start, goal, SCHEMAS, Budget(capacity))
    best = shortest_bytes(start, goal, SCHEMAS, capacity)
    assert dag.bound_bytes == best == 1.5 * stored_bytes(goal, SCHEMAS)[7]
