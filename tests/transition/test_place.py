"""Placement: as few bytes as possible move, and what fits is kept."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import EMU, EMUSet, Layout, StateSchema, expand
from nereus.transition import place
from nereus.transition.keep import keep
from nereus.transition.rows import ByDevice, looked_up
from nereus.transition.site import Site
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
    goal = place(start, wanted, {ACTOR: even()}, Site(nodes))
    assert [{nodes[device] for device in unit.devices} for unit in goal] == [{0}, {1}]
    mixed = place(start, wanted, {ACTOR: even()})
    assert moved(start, mixed, even()) < moved(start, goal, even())


def test_nodes_change_places_whole_when_less_moves() -> None:
    """Two replicas of eight-way TP over two nodes become one over four: nothing has to cross a node."""
    nodes = {device: device // 8 for device in range(32)}
    start = EMUSet(units(ACTOR, Layout(8, 2), *range(32)))
    (goal,) = place(start, plan(assign(ACTOR, Layout(8, 4), *range(32))), {ACTOR: even()}, Site(nodes))
    assert moved(start, EMUSet((goal,)), even()) == 0
    runs = [goal.devices[i : i + 8] for i in range(0, 32, 8)]
    assert all(len({nodes[device] for device in run}) == 1 for run in runs)


def test_nodes_of_different_kinds_do_not_change_places() -> None:
    nodes = {device: device // 8 for device in range(32)}
    kinds = {device: "slow" if device < 16 else "fast" for device in nodes}
    start = EMUSet(units(ACTOR, Layout(8, 2), *range(32)))
    wanted = plan(assign(ACTOR, Layout(8, 4), *range(32)))
    (goal,) = place(start, wanted, {ACTOR: even()}, Site(nodes, kinds))
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
    found = place(start, second, {ACTOR: schema}, Site(nodes))
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


def kept_one_by_one(
    old: Sequence[Sequence[int]], slots: Sequence[Sequence[int]], nodes: Mapping[int, int]
) -> dict[int, int]:
    """Slot → unit: first where the devices are the same, then the nearest slot on the same nodes, unit after unit."""
    found = {i: u for i, slot in enumerate(slots) for u, unit in enumerate(old) if set(slot) == set(unit)}
    pool = {device for slot in slots for device in slot}
    for u, unit in enumerate(old):
        if u in found.values() or not pool.issuperset(unit):
            continue
        open_ = [i for i, s in enumerate(slots) if i not in found and [nodes[d] for d in s] == [nodes[d] for d in unit]]
        if open_:
            found[max(open_, key=lambda i: (len(set(slots[i]) & set(unit)), -i))] = u
    return found


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.booleans())
def test_units_are_kept_as_if_one_after_another_looked_for_its_slot(
    rng: random.Random, size: int, one_node: bool
) -> None:
    pool = list(range(16))
    nodes = dict.fromkeys(pool, 0) if one_node else {device: device // rng.choice((2, 4)) for device in pool}
    count = rng.randint(1, 16 // size)
    old = rng.sample(pool, size * count)
    named = list(old)
    for _ in range(rng.randint(0, 4)):
        a, b = rng.randrange(len(named)), rng.choice(pool)
        if b in named:
            named[named.index(b)] = named[a]
        named[a] = b
    old_rows, slots = (np.array(each).reshape(-1, size) for each in (old, named))
    found = keep(old_rows, slots, np.zeros_like if one_node else ByDevice(nodes))
    expected = kept_one_by_one(old_rows.tolist(), slots.tolist(), nodes)
    assert {slot: unit for slot, unit in enumerate(found.tolist()) if unit >= 0} == expected


@given(st.lists(st.integers(-5, 40) | st.integers(1 << 40, (1 << 40) + 9), unique=True), st.lists(st.integers(-9, 50)))
def test_values_are_looked_up_by_device_however_far_apart_the_numbers_are(keys: list[int], asked: list[int]) -> None:
    known = {key: index for index, key in enumerate(keys)}
    asked = asked + keys[::2]
    devices, names, values = (np.array(each, dtype=np.int64) for each in (asked, keys, list(known.values())))
    assert looked_up(devices, names, values, -7).tolist() == [known.get(device, -7) for device in asked]


def test_far_numbers_and_devices_without_a_node_are_placed_like_near_ones() -> None:
    far = {device: device * 10**9 + 7 for device in range(16)}
    start = EMUSet(units(ACTOR, Layout(4), *range(16)))
    wanted = [plan(assign(ACTOR, Layout(2, 4), *(name[d] for d in range(16)))) for name in ({d: d for d in far}, far)]
    nodes = {device: device // 4 for device in range(12)}  # the last four are each on a node of their own
    near = place(start, wanted[0], {ACTOR: even()}, Site(nodes))
    moved_away = EMUSet(tuple(EMU(ACTOR, u.layout, tuple(far[d] for d in u.devices)) for u in start))
    again = place(moved_away, wanted[1], {ACTOR: even()}, Site({far[device]: node for device, node in nodes.items()}))
    assert [unit.devices for unit in again] == [tuple(far[d] for d in unit.devices) for unit in near]
