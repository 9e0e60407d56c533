"""Placement: as few bytes as possible move, and what fits is kept."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest

from nereus.core import EMU, EMUSet, Layout, StateSchema, expand
from nereus.transition import place
from tests.oracles.cut import lacks_bytes
from tests.support.models import ACTOR, assign, decoder, even, plan, units
from tests.support.pairs import random_plan


def moved(start: EMUSet, goal: EMUSet, schema: StateSchema) -> int:
    return sum(lacks_bytes(schema, start.of(ACTOR), unit, d) for unit in goal for d in unit.devices)


def test_merging_two_tp4_replicas_into_tp8_moves_nothing() -> None:
    start = EMUSet(units(ACTOR, Layout(4), *range(8)))
    goal = place(start, plan(assign(ACTOR, Layout(8), *range(8))), {ACTOR: even()})
    assert moved(start, goal, even()) == 0


def test_units_that_fit_are_kept_whatever_order_the_plan_names() -> None:
    start = EMUSet(units(ACTOR, Layout(2), 3, 1, 0, 2))
    wanted = plan(assign(ACTOR, Layout(2), 0, 2, 4, 5, 1, 3))
    goal = place(start, wanted, {ACTOR: decoder()})
    assert goal.units == (start.units[1], EMU(ACTOR, Layout(2), (4, 5)), start.units[0])


def test_units_are_kept_when_the_plan_draws_their_borders_differently() -> None:
    start = EMUSet(units(ACTOR, Layout(2), 0, 1, 2, 3))
    goal = place(start, plan(assign(ACTOR, Layout(2), 0, 2, 1, 3)), {ACTOR: decoder()})
    assert set(goal) == set(start)


@pytest.mark.parametrize("seed", range(60))
def test_never_worse_than_the_order_of_the_plan(seed: int) -> None:
    rng = random.Random(seed)
    schema = decoder(layers=rng.choice([3, 4]))
    first = random_plan(rng, {ACTOR: schema}, range(8))
    second = random_plan(rng, {ACTOR: schema}, range(8), first)
    start = expand(first)
    assert moved(start, place(start, second, {ACTOR: schema}), schema) <= moved(start, expand(second), schema)


@pytest.mark.parametrize("seed", range(8))
def test_as_good_as_trying_every_order(seed: int) -> None:
    rng = random.Random(seed)
    schema = decoder(layers=2, heads=4)
    first = random_plan(rng, {ACTOR: schema}, range(5))
    second = random_plan(rng, {ACTOR: schema}, range(5), first)
    start, layout = expand(first), second.assignments[0].candidate.layout
    pool = [device for unit in second.assignments[0].units for device in unit]
    best = min(moved(start, EMUSet(units(ACTOR, layout, *order)), schema) for order in permutations(pool))
    assert moved(start, place(start, second, {ACTOR: schema}), schema) == best


def test_positions_stay_on_the_node_that_the_plan_gave_them() -> None:
    start = EMUSet(units(ACTOR, Layout(8), *range(8)))
    wanted = plan(assign(ACTOR, Layout(4), *range(8)))
    nodes = {device: device // 4 for device in range(8)}
    goal = place(start, wanted, {ACTOR: even()}, nodes)
    assert [{nodes[device] for device in unit.devices} for unit in goal] == [{0}, {1}]
    mixed = place(start, wanted, {ACTOR: even()})
    assert moved(start, mixed, even()) < moved(start, goal, even())


def test_nodes_change_places_whole_when_less_moves() -> None:
    """Two replicas of eight-way TP over two nodes become one over four: nothing has to cross a node."""
    nodes = {device: device // 8 for device in range(32)}
    start = EMUSet(units(ACTOR, Layout(8, 2), *range(32)))
    (goal,) = place(start, plan(assign(ACTOR, Layout(8, 4), *range(32))), {ACTOR: even()}, nodes)
    assert moved(start, EMUSet((goal,)), even()) == 0
    runs = [goal.devices[i : i + 8] for i in range(0, 32, 8)]
    assert all(len({nodes[device] for device in run}) == 1 for run in runs)


def test_nodes_of_different_kinds_do_not_change_places() -> None:
    nodes = {device: device // 8 for device in range(32)}
    kinds = {device: "slow" if device < 16 else "fast" for device in nodes}
    start = EMUSet(units(ACTOR, Layout(8, 2), *range(32)))
    wanted = plan(assign(ACTOR, Layout(8, 4), *range(32)))
    (goal,) = place(start, wanted, {ACTOR: even()}, nodes, kinds)
    assert {kinds[device] for device in goal.devices[:16]} == {"slow"}
    assert moved(start, EMUSet((goal,)), even()) > 0


@pytest.mark.parametrize("seed", range(12))
def test_as_good_as_trying_every_order_of_nodes_and_every_order_within_them(seed: int) -> None:
    rng = random.Random(seed)
    schema = decoder(layers=2, heads=4)
    nodes = {device: device // 2 for device in range(6)}
    first = random_plan(rng, {ACTOR: schema}, range(6))
    second = random_plan(rng, {ACTOR: schema}, range(6), first)
    start, layout = expand(first), second.assignments[0].candidate.layout
    pool = [device for unit in second.assignments[0].units for device in unit]
    found = place(start, second, {ACTOR: schema}, nodes)
    together = Counter(frozenset(places) for places in _on_nodes(pool, nodes).values())
    kept = {unit.devices for unit in found} & {unit.devices for unit in start}
    dealt = [device for unit in found for device in unit.devices]
    if not kept:
        assert Counter(frozenset(places) for places in _on_nodes(dealt, nodes).values()) == together
    best = min(
        moved(start, EMUSet(units(ACTOR, layout, *order)), schema)
        for order in permutations(pool)
        if Counter(frozenset(places) for places in _on_nodes(order, nodes).values()) == together
    )
    assert moved(start, found, schema) == best


def _on_nodes(order: Sequence[int], nodes: Mapping[int, int]) -> dict[int, list[int]]:
    """Node → the places of the plan on it."""
    found: dict[int, list[int]] = {}
    for index, device in enumerate(order):
        found.setdefault(nodes[device], []).append(index)
    return found
