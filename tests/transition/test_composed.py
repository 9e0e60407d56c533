"""The paper's composed form: T_sub units exist, C bytes move, the end is the plan."""

from __future__ import annotations

import random

import pytest

from nereus.core import EMUSet, InfeasibleError, Layout, Merge, ModelStage, Plan, Split, StateSchema, expand
from nereus.engine.transports.memory import execute
from nereus.transition import compose, composed_bytes, stored_bytes
from nereus.transition.budget import Budget
from tests.support.models import ACTOR, CRITIC, TRAINED, assign, decoder, even, full_bytes, plan
from tests.support.pairs import random_plan, random_schemas
from tests.support.worlds import assert_holds, filled

SCHEMA = even(layers=8, rows=64, columns=2, kinds=TRAINED)
PAIRS = {
    "TP4 to TP2, PP2": (plan(assign(ACTOR, Layout(4), *range(4))), plan(assign(ACTOR, Layout(2, 2), *range(4)))),
    "TP4 x DP2 to TP8": (plan(assign(ACTOR, Layout(4), *range(8))), plan(assign(ACTOR, Layout(8), *range(8)))),
    "DP2 to DP4": (plan(assign(ACTOR, Layout(2), *range(4))), plan(assign(ACTOR, Layout(2), *range(8)))),
    "TP2 to TP4 on twice the devices": (
        plan(assign(ACTOR, Layout(2), *range(4))),
        plan(assign(ACTOR, Layout(4), *range(8))),
    ),
    "TP8, PP2 to TP4": (
        plan(assign(ACTOR, Layout(8, 2), *range(16))),
        plan(assign(ACTOR, Layout(4), *range(16), *range(16, 24))),
    ),
}


def moved_bytes(start: EMUSet, after: Plan, schemas: dict[ModelStage, StateSchema]) -> int:
    """Bytes that cross between ranks in all three transitions, each checked bit for bit."""
    world, moved = filled(start, schemas), 0
    for dag in compose(start, after, schemas):
        moved += execute(dag, schemas, world).sent_bytes.total()
        assert_holds(world, dag.goal, schemas)
    assert {unit.layout for unit in dag.goal.of(ACTOR)} == {after.of(ACTOR).candidate.layout}
    return moved


@pytest.mark.parametrize("name", PAIRS)
def test_the_composition_moves_c_bytes_and_every_bit_arrives(name: str) -> None:
    before, after = PAIRS[name]
    start = expand(before)
    moved = moved_bytes(start, after, {ACTOR: SCHEMA})
    goal = compose(start, after, {ACTOR: SCHEMA})[-1].goal
    assert moved == composed_bytes(SCHEMA, start.blocks(ACTOR), goal.blocks(ACTOR))
    assert (moved == 0) is (name == "TP4 x DP2 to TP8"), "a Merge alone moves nothing"


def test_split_gathers_copies_and_merge_moves_nothing() -> None:
    start = expand(plan(assign(ACTOR, Layout(4, 2), *range(8))))
    split, between, merge = compose(start, plan(assign(ACTOR, Layout(2, 4), *range(8))), {ACTOR: SCHEMA})
    assert {unit.layout for unit in split.goal} == {Layout(2, 2)}
    assert [type(step) for step in split.primitives if step.targets] == [Split]
    assert not between.primitives
    assert [type(step) for step in merge.primitives if step.targets] == [Merge]
    world = filled(start, {ACTOR: SCHEMA})
    assert execute(split, {ACTOR: SCHEMA}, world).sent_bytes.total() == full_bytes(SCHEMA)
    assert execute(merge, {ACTOR: SCHEMA}, world).sent_bytes.total() == 0


def test_whole_sub_units_need_memory_that_the_direct_form_does_not() -> None:
    start, after = expand(plan(assign(ACTOR, Layout(4), *range(4)))), plan(assign(ACTOR, Layout(1, 4), *range(4)))
    held = stored_bytes(start, {ACTOR: SCHEMA})
    with pytest.raises(InfeasibleError):
        compose(start, after, {ACTOR: SCHEMA}, Budget({device: 2 * size for device, size in held.items()}))


def test_a_model_stage_that_stays_is_left_alone() -> None:
    both = plan(assign(ACTOR, Layout(2), 0, 1), assign(CRITIC, Layout(2), 2, 3))
    after = plan(assign(ACTOR, Layout(1), 0, 1), assign(CRITIC, Layout(2), 2, 3))
    schemas = {ACTOR: SCHEMA, CRITIC: decoder(scalar=True)}
    assert all(step.model_stage == ACTOR for dag in compose(expand(both), after, schemas) for step in dag.primitives)


@pytest.mark.parametrize("seed", range(25))
def test_random_plans_are_reached_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    schemas = random_schemas(rng)
    start = expand(random_plan(rng, schemas, rng.sample(range(8), 6)))
    after = random_plan(rng, schemas, rng.sample(range(8), 7))
    world = filled(start, schemas)
    for dag in compose(start, after, schemas):
        execute(dag, schemas, world)
        assert_holds(world, dag.goal, schemas)
    for ms in schemas:
        assert {d for unit in dag.goal.of(ms) for d in unit.devices} == set(after.of(ms).devices)
