"""The in-process transport notices what would be wrong on real devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from nereus.core import EMUSet, Layout, Move, OutOfMemoryError, StateSchema, TransitionDAG, TransitionError
from nereus.engine.transports import memory
from nereus.engine.transports.memory import execute
from nereus.transition import compile, expand_flows
from nereus.transition.flows import Flow
from tests.support.models import ACTOR, assign, decoder, plan, units
from tests.support.worlds import assert_holds, filled

SCHEMAS = {ACTOR: decoder()}
START = EMUSet(units(ACTOR, Layout(2), 0, 1))


def split() -> TransitionDAG:
    return compile(START, plan(assign(ACTOR, Layout(1), 0, 1)), SCHEMAS)


def test_a_destroy_before_the_commit_is_refused() -> None:
    dag = split()
    early = TransitionDAG(dag.start, dag.goal, tuple(reversed(dag.primitives)))
    with pytest.raises(TransitionError, match="has committed"):
        execute(early, SCHEMAS, filled(START, SCHEMAS))


@pytest.mark.parametrize("wrong", [lambda moves: (*moves, moves[-1]), lambda moves: moves[:-1]])
def test_an_element_written_twice_or_left_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[tuple[Move, ...]], tuple[Move, ...]]
) -> None:
    monkeypatch.setattr(memory, "expand_flows", lambda found, schema: wrong(expand_flows(found, schema)))
    with pytest.raises(TransitionError, match="not written exactly once"):
        execute(split(), SCHEMAS, filled(START, SCHEMAS))


def test_a_write_into_a_source_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(START, SCHEMAS)

    def meddle(found: Iterable[Flow], schema: StateSchema) -> tuple[Move, ...]:
        next(iter(world.positions[0, START.units[0]].values()))[:] = 0
        return expand_flows(found, schema)

    monkeypatch.setattr(memory, "expand_flows", meddle)
    with pytest.raises(ValueError, match="read-only"):
        execute(split(), SCHEMAS, world)


def test_capacity_is_enforced_and_the_start_is_left_as_it_was() -> None:
    world = filled(START, SCHEMAS)
    limit = {device: world.stored_bytes(device) + 100 for device in (0, 1)}
    with pytest.raises(OutOfMemoryError, match="device 0"):
        execute(split(), SCHEMAS, world, limit)
    assert_holds(world, START, SCHEMAS)


def test_a_whole_split_counts_each_byte_on_both_sides() -> None:
    world = filled(START, SCHEMAS)
    traffic = execute(split(), SCHEMAS, world)
    assert traffic.sent_bytes[0] == traffic.received_bytes[1] > 0
    assert world.units == split().goal
