"""Shortcuts of planning against the long way: rules that are skipped, orders given up, sums and levels by device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from nereus.core import EMUSet, InfeasibleError, TransitionDAG
from nereus.transition import connect
from nereus.transition.budget import Budget
from nereus.transition.decompose import LocalDAG
from nereus.transition.minimum import EXPANDED, _most
from nereus.transition.room import Room
from nereus.transition.run import Run
from nereus.transition.schedule import TRIES, Memory, schedule
from nereus.transition.site import Site
from nereus.transition.totals import highest, totals
from tests.oracles.shortest_orders import shortest_bytes
from tests.support.small import SCHEMAS, random_case


def spans(ways: Mapping[str, Sequence[LocalDAG]], memory: Memory, site: Site) -> Iterator[float]:
    """How long the order is that each try finds, whatever the others found."""
    for way, rule in TRIES:
        fresh = [local.copy() for local in ways.get(way, ())]
        if not fresh:
            continue
        builds = [build for local in fresh for build in local.builds]
        run = Run(fresh, Room(memory.used, memory.capacity, builds, memory.buffer_bytes), site, rule)
        if run.walk() is None:
            yield run.span_bytes


@settings(max_examples=80, deadline=None)
@example(seed=0, far=1.0, limited=True)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 4.0]), st.booleans())
def test_no_rule_that_is_skipped_and_no_order_that_is_given_up_is_shorter(seed: int, far: float, limited: bool) -> None:
    start, goal, capacity = random_case(seed)
    found: list[float] = []

    def checked(start: EMUSet, goal: EMUSet, ways: Mapping[str, Sequence[LocalDAG]], *rest: object) -> TransitionDAG:
        memory, site = rest[0], rest[1]
        assert isinstance(memory, Memory)
        assert isinstance(site, Site)
        if len(rest) < 3 or rest[2] is None:  # no known way is followed
            found.extend(spans(ways, memory, site))
        return schedule(start, goal, ways, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        module = import_module("nereus.transition.compile")
        patch.setattr(module, "schedule", checked)
        patch.setattr(module, "fold", lambda *_: ())  # all in one order
        patch.setattr(module, "spared", lambda dag, *_: dag)  # as found, whatever it moves
        nodes = {device: device // 2 for unit in (*start, *goal) for device in unit.devices}
        try:
            dag = connect(start, goal, SCHEMAS, Budget(capacity if limited else {}), Site(nodes, far=far))
        except InfeasibleError:
            assert not found
            return
    if found:
        assert dag.span_bytes == round(min(found))


@pytest.mark.parametrize("seed", [2859, 41, 132, 3651, 112, 297, 1495, 2443])
def test_each_try_leads_to_a_shortest_order_that_no_other_finds(seed: int) -> None:
    """In the order of the tries, after the first one; at last by what units cost to lose."""
    start, goal, capacity = random_case(seed)
    assert connect(start, goal, SCHEMAS, Budget(capacity)).span_bytes == shortest_bytes(start, goal, SCHEMAS, capacity)


@pytest.mark.parametrize("seed", [5720, 5884])
def test_no_group_that_has_started_is_still_said_to_lose_what_it_reads(seed: int) -> None:
    """Cases in which a group that has lost all it was to read is built together with another one."""
    start, goal, capacity = random_case(seed)
    ended: list[bool] = []
    walk = Run.walk

    def checked(run: Run, *rest: Any) -> Any:
        stuck = walk(run, *rest)
        if stuck is None and not run.late:
            parts = [run.part(step.build.goals[0]) for step in run.order if step.build]
            ended.append(not any(part.open or part.risky for part in parts))
        return stuck

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "walk", checked)
        connect(start, goal, SCHEMAS, Budget(capacity))
    assert ended
    assert all(ended)


entries = st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=30)


@given(entries)
def test_sums_and_highest_levels_are_those_of_going_through_the_entries(found: list[tuple[int, int]]) -> None:
    sums: dict[int, int] = {}
    most: dict[int, int] = {}
    for device, size in found:
        sums[device] = sums.get(device, 0) + size
        if size > 0:
            most[device] = max(sums[device], most.get(device, sums[device]))
    devices, sizes = [device for device, _ in found], [size for _, size in found]
    assert totals(devices, sizes) == sums
    assert highest(devices, sizes) == most


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_the_most_that_can_stay_is_that_of_the_linear_program(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows, columns = draw.integers(1, 4, 2)
    table = draw.integers(0, 6, (rows, columns)) * draw.integers(0, 2, (rows, columns))
    supply, demand = (draw.integers(1, 2 * EXPANDED, size) for size in (rows, columns))
    if not table.any():
        return
    sums = np.vstack([np.kron(np.eye(rows), np.ones(columns)), np.kron(np.ones(rows), np.eye(columns))])
    best = linprog(-table.reshape(-1), A_ub=sums, b_ub=np.concatenate([supply, demand]))
    assert best.fun is not None
    assert _most(table, supply, demand) == round(-best.fun)
