"""Fig. 5, the example of §5.1, and Fig. 1b: which primitives, who sends to whom, and every bit in its place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import pytest

from nereus.core import Assignment, EdgeKind, EMUSet, Layout, ModelStage, TransitionDAG, expand
from nereus.engine.transports.memory import execute
from nereus.transition import compile, composed_bytes, moves_of, stored_bytes
from nereus.transition.budget import Budget
from tests.support.models import (
    ACTOR,
    CRITIC,
    REWARD,
    ROLLOUT,
    TRAINED,
    assign,
    decoder,
    even,
    full_bytes,
    plan,
    units,
)
from tests.support.worlds import assert_holds, filled

REFERENCE = ModelStage.parse("reference/inference")
SCHEMA = even(kinds=TRAINED)


def names(dag: TransitionDAG, ms: ModelStage) -> list[str]:
    return [step.name for step in dag.primitives if step.model_stage == ms]


def gpus(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


@dataclass(frozen=True)
class Panel:
    """One panel: `pairs` are the GPUs that exchange, `copies` what moves in copies of the state."""

    before: Assignment
    after: Assignment
    steps: tuple[str, ...]
    pairs: frozenset[frozenset[int]]
    copies: int


def exchanging(*pairs: tuple[int, int]) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, pairs))


WIDE = assign(ACTOR, Layout(2, 2), *gpus(1, 4))
TP_ONLY, PP_ONLY = assign(ACTOR, Layout(2, 1), *gpus(1, 4)), assign(ACTOR, Layout(1, 2), 1, 3, 2, 4)
DESTROYED = ("Destroy", "Destroy")
PANELS = {
    "a, PP-Split": Panel(WIDE, TP_ONLY, ("Split", "Destroy"), exchanging((1, 3), (2, 4)), 1),
    "a, TP-Split": Panel(WIDE, PP_ONLY, ("Split", "Destroy"), exchanging((1, 2), (3, 4)), 1),
    "b, PP-Merge": Panel(TP_ONLY, WIDE, ("Merge", *DESTROYED), exchanging(), 0),
    "b, TP-Merge": Panel(PP_ONLY, WIDE, ("Merge", *DESTROYED), exchanging(), 0),
    "c, Extend": Panel(
        PP_ONLY,
        assign(ACTOR, Layout(1, 2), 1, 3, 2, 4, *gpus(5, 8)),
        ("Extend", "Extend"),
        exchanging((1, 5), (3, 6), (2, 7), (4, 8)),
        2,
    ),
    "d, Destroy": Panel(
        assign(ACTOR, Layout(1, 4), *gpus(1, 8)),
        assign(ACTOR, Layout(1, 4), *gpus(5, 8)),
        ("Destroy",),
        exchanging(),
        0,
    ),
}


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_each_panel_is_its_primitive_between_its_gpus(panel: Panel) -> None:
    schemas, start = {ACTOR: SCHEMA}, expand(plan(panel.before))
    dag = compile(start, plan(panel.after), schemas)
    assert tuple(names(dag, ACTOR)) == panel.steps
    moves = [move for step in dag.primitives for move in moves_of(dag, step, SCHEMA)]
    assert {frozenset((move.source, *move.targets)) for move in moves} == panel.pairs
    world = filled(start, schemas)
    traffic = execute(dag, schemas, world)
    assert_holds(world, dag.goal, schemas)
    assert traffic.received_bytes.total() == panel.copies * full_bytes(SCHEMA)
    composed = composed_bytes(SCHEMA, start.blocks(ACTOR), dag.goal.blocks(ACTOR))
    assert composed == panel.copies * full_bytes(SCHEMA)


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_each_panel_holds_for_uneven_tensors(panel: Panel) -> None:
    """Padded vocabulary, few KV heads, norms on every rank."""
    schemas, start = {ACTOR: decoder(layers=5, tied=True)}, expand(plan(panel.before))
    dag = compile(start, plan(panel.after), schemas)
    world = filled(start, schemas)
    execute(dag, schemas, world)
    assert_holds(world, dag.goal, schemas)


@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_split_and_merge_are_defined_for_any_factor(axis: str, factor: int) -> None:
    """§5.2: for any integer factor between compatible layouts."""
    schemas, small = {ACTOR: decoder(layers=12, heads=24, kv_heads=12, ffn=48)}, Layout(2, 2)
    large = Layout(2 * factor, 2) if axis == "tp" else Layout(2, 2 * factor)
    pool = gpus(1, large.size)
    one, many = (plan(assign(ACTOR, layout, *pool)) for layout in (large, small))
    world = filled(expand(one), schemas)
    split = compile(expand(one), many, schemas)
    assert names(split, ACTOR) == ["Split", "Destroy"]
    execute(split, schemas, world)
    merge = compile(split.goal, one, schemas)
    assert names(merge, ACTOR) == ["Merge", *["Destroy"] * factor]
    execute(merge, schemas, world)
    assert_holds(world, merge.goal, schemas)


def test_section_5_1_actor_raises_tp_by_extend_and_merge_critic_raises_dp_by_extend() -> None:
    """16 GPUs become 32; the actor's new ranks take half of a pp rank each, the critic's a whole one."""
    schemas = {ROLLOUT: SCHEMA, CRITIC: SCHEMA}
    start = plan(assign(ROLLOUT, Layout(1, 4), *gpus(1, 8)), assign(CRITIC, Layout(1, 4), *gpus(9, 16)))
    goal = plan(
        assign(ROLLOUT, Layout(2, 4), *gpus(1, 4), *gpus(17, 20), *gpus(5, 8), *gpus(21, 24)),
        assign(CRITIC, Layout(1, 4), *gpus(9, 16), *gpus(25, 32)),
    )
    dag = compile(expand(start), goal, schemas)
    assert names(dag, CRITIC) == ["Extend", "Extend"]
    actor = names(dag, ROLLOUT)
    assert Counter(actor) == {"Extend": 2, "Merge": 2, "Destroy": 2}
    assert actor.index("Extend") < actor.index("Merge")
    world = filled(dag.start, schemas)
    traffic = execute(dag, schemas, world)
    assert_holds(world, dag.goal, schemas)
    received = {device: Fraction(size, full_bytes(SCHEMA)) for device, size in traffic.received_bytes.items()}
    assert received == dict.fromkeys(gpus(17, 24), Fraction(1, 8)) | dict.fromkeys(gpus(25, 32), Fraction(1, 4))
    composed = [composed_bytes(SCHEMA, dag.start.blocks(ms), dag.goal.blocks(ms)) for ms in (ROLLOUT, CRITIC)]
    assert composed == [2 * full_bytes(SCHEMA)] * 2


def test_fig_1b_growing_lengths_merge_inference_and_split_training() -> None:
    frozen, trained = {ROLLOUT, REFERENCE, REWARD}, {ACTOR, CRITIC}
    schemas = {ms: decoder(heads=4, vocab=16) for ms in frozen | trained}
    s1 = plan(
        assign(ROLLOUT, Layout(2), 1, 2, 3, 4),
        assign(REFERENCE, Layout(1), 5, 6),
        assign(REWARD, Layout(1), 7, 8),
        assign(ACTOR, Layout(2), 9, 10),
        assign(CRITIC, Layout(2), 11, 12),
    )
    s2 = plan(
        assign(ROLLOUT, Layout(4), 1, 2, 3, 4),
        assign(REFERENCE, Layout(2), 5, 6),
        assign(REWARD, Layout(2), 7, 8),
        assign(ACTOR, Layout(1), 9, 10),
        assign(CRITIC, Layout(1), 11, 12),
    )
    s3 = plan(*s2.assignments[:3], assign(ACTOR, Layout(1), 9), assign(CRITIC, Layout(1), 10, 11, 12, 13))
    world = filled(expand(s1), schemas)
    first = compile(expand(s1), s2, schemas)
    assert all(names(first, ms)[0] == "Merge" for ms in frozen)
    assert all(names(first, ms)[0] == "Split" for ms in trained)
    sent = execute(first, schemas, world).sent_bytes
    assert set(sent) == {9, 10, 11, 12}, "a Merge of replicas moves nothing"

    one_unit = stored_bytes(EMUSet(units(ACTOR, Layout(1), 10)), schemas)[10]
    second = compile(first.goal, s3, schemas, Budget({10: one_unit * 3 // 2}))
    assert names(second, ACTOR) == ["Destroy"]
    assert names(second, CRITIC) == ["Extend", "Extend"]
    assert {str(ms) for ms in {step.model_stage for step in second.primitives}} == {str(ACTOR), str(CRITIC)}
    by_id = {step.id: step for step in second.primitives}
    resource = [(by_id[e.earlier], by_id[e.later]) for e in second.edges if e.kind is EdgeKind.RESOURCE]
    assert [(earlier.name, earlier.model_stage, later.targets[0].devices) for earlier, later in resource] == [
        ("Destroy", ACTOR, (10,))
    ]
    execute(second, schemas, world, {10: one_unit * 3 // 2})
    assert_holds(world, second.goal, schemas)
