"""The paper's own examples: Fig. 1b, Fig. 5, Fig. 6 and the example of §5.1."""

from __future__ import annotations

from collections import Counter

import pytest

from nereus.core import (
    Assignment,
    Calibration,
    Cluster,
    Device,
    DeviceKind,
    EdgeKind,
    EMUSet,
    Layout,
    Link,
    ModelStage,
    TransitionDAG,
    TransitionEstimate,
    expand,
)
from nereus.engine.transports.memory import execute
from nereus.transition import compile, estimate, peak_bytes, stored_bytes
from tests.support.models import ACTOR, CRITIC, REWARD, ROLLOUT, TRAINED, assign, decoder, even, full_bytes, plan, units
from tests.support.worlds import assert_holds, filled

REFERENCE = ModelStage.parse("reference/inference")
NODES = Cluster(
    tuple(Device(i, i // 8, "any") for i in range(1, 97)),
    {"any": DeviceKind("any", 1, {}, 1.0)},
    {"intra": Link(1e9, 1e-5), "inter": Link(1e8, 1e-4)},
)


def names(dag: TransitionDAG, ms: ModelStage) -> list[str]:
    return [step.name for step in dag.primitives if step.model_stage == ms]


def until(first: int, last: int) -> range:
    return range(first, last + 1)


def in_copies(assignment: Assignment, start: EMUSet) -> tuple[float, float, float]:
    """Moved, minimum and composed bytes as multiples of one copy of an evenly cut model."""
    ms = assignment.candidate.model_stage
    schema = even(layers=16, rows=64, kinds=TRAINED)
    dag = compile(start, plan(assignment), {ms: schema}, {})
    found: TransitionEstimate = estimate(dag, {ms: schema}, NODES, Calibration())
    copy = full_bytes(schema)
    return found.moved_bytes / copy, found.minimum_bytes / copy, found.composed_bytes / copy


def test_fig_1b_growing_lengths_merge_inference_and_split_training() -> None:
    frozen, trained = {ROLLOUT, REFERENCE, REWARD}, {ACTOR, CRITIC}
    schemas = {ms: decoder(heads=4) for ms in frozen | trained}
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
    first = compile(expand(s1), s2, schemas, {})
    assert all(names(first, ms)[0] == "Merge" for ms in frozen)
    assert all(names(first, ms)[0] == "Split" for ms in trained)
    execute(first, schemas, world)

    one_unit = stored_bytes(EMUSet(units(ACTOR, Layout(1), 10)), schemas)[10]
    second = compile(first.goal, s3, schemas, {10: one_unit * 3 // 2})
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


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        (assign(ACTOR, Layout(1, 2), 1, 2), assign(ACTOR, Layout(1, 1), 1, 2), ["Split", "Destroy"]),
        (assign(ACTOR, Layout(2, 1), 1, 2), assign(ACTOR, Layout(1, 1), 1, 2), ["Split", "Destroy"]),
        (assign(ACTOR, Layout(1, 1), 1, 2), assign(ACTOR, Layout(2, 1), 1, 2), ["Merge", "Destroy", "Destroy"]),
        (assign(ACTOR, Layout(1, 2), *until(1, 4)), assign(ACTOR, Layout(1, 2), *until(1, 8)), ["Extend", "Extend"]),
        (assign(ACTOR, Layout(1, 4), *until(1, 8)), assign(ACTOR, Layout(1, 4), *until(5, 8)), ["Destroy"]),
    ],
)
def test_fig_5_one_primitive_each(before: Assignment, after: Assignment, steps: list[str]) -> None:
    schemas = {ACTOR: decoder()}
    dag = compile(expand(plan(before)), plan(after), schemas, {})
    assert names(dag, ACTOR) == steps
    world = filled(dag.start, schemas)
    execute(dag, schemas, world)
    assert_holds(world, dag.goal, schemas)


def test_section_5_1_actor_raises_tp_and_critic_raises_dp() -> None:
    schemas = {ROLLOUT: decoder(), CRITIC: decoder(scalar=True)}
    start = plan(assign(ROLLOUT, Layout(1, 4), *range(8)), assign(CRITIC, Layout(1, 4), *range(8, 16)))
    goal = plan(
        assign(ROLLOUT, Layout(2, 4), *range(8), *range(16, 24)),
        assign(CRITIC, Layout(1, 4), *range(8, 16), *range(24, 32)),
    )
    dag = compile(expand(start), goal, schemas, {})
    assert names(dag, CRITIC) == ["Extend", "Extend"]
    assert set(names(dag, ROLLOUT)) == {"Extend", "Merge", "Destroy"}
    world = filled(dag.start, schemas)
    execute(dag, schemas, world)
    assert_holds(world, dag.goal, schemas)


def test_fig_6_extends_wait_for_the_reward_unit_to_leave() -> None:
    schema = even(layers=16, rows=64, kinds=TRAINED)
    schemas = {ROLLOUT: schema, CRITIC: schema, REWARD: even(layers=16, rows=4096, kinds=TRAINED)}
    start = plan(
        assign(ROLLOUT, Layout(2, 4), *until(1, 32)),
        assign(REWARD, Layout(4, 8), *until(33, 64)),
        assign(CRITIC, Layout(1, 4), *until(65, 96)),
    )
    goal = plan(
        assign(ROLLOUT, Layout(4, 2), *until(1, 32), *until(49, 64)),
        assign(REWARD, Layout(8, 2), *until(33, 48)),
        assign(CRITIC, Layout(1, 2), *until(49, 96)),
    )
    free = compile(expand(start), goal, schemas, {})
    shared = {d: max(stored_bytes(free.start, schemas)[d], stored_bytes(free.goal, schemas)[d]) for d in until(49, 64)}
    assert any(peak_bytes(free, schemas)[d] > shared[d] for d in shared)
    dag = compile(expand(start), goal, schemas, shared)
    by_id = {step.id: step for step in dag.primitives}
    waits = {
        (by_id[edge.earlier].model_stage, by_id[edge.earlier].name, by_id[edge.later].model_stage)
        for edge in dag.edges
        if edge.kind is EdgeKind.RESOURCE
    }
    assert (REWARD, "Destroy", ROLLOUT) in waits
    assert {earlier for earlier, _, _ in waits} == {REWARD}
    assert all(peak_bytes(dag, schemas)[d] <= limit for d, limit in shared.items())


@pytest.mark.parametrize(
    ("before", "after", "minimum", "composed"),
    [
        (assign(ACTOR, Layout(4), *until(1, 4)), assign(ACTOR, Layout(8), *until(1, 8)), 0.5, 1.0),
        (assign(ACTOR, Layout(8), *until(1, 8)), assign(ACTOR, Layout(4), *until(1, 8)), 1.0, 1.0),
        (assign(ACTOR, Layout(4), *until(1, 8)), assign(ACTOR, Layout(8), *until(1, 8)), 0.0, 0.0),
        (assign(ACTOR, Layout(2, 2), *until(1, 4)), assign(ACTOR, Layout(4, 1), *until(1, 4)), 0.5, 1.0),
        (assign(ACTOR, Layout(4, 1), *until(1, 4)), assign(ACTOR, Layout(2, 2), *until(1, 4)), 0.5, 1.0),
        (assign(ACTOR, Layout(2, 2), *until(1, 4)), assign(ACTOR, Layout(1, 1), *until(1, 4)), 3.0, 3.0),
        (assign(ACTOR, Layout(1, 1), *until(1, 4)), assign(ACTOR, Layout(2, 2), *until(1, 4)), 0.0, 0.0),
        (assign(ACTOR, Layout(1, 1), *until(1, 4)), assign(ACTOR, Layout(1, 1), *until(1, 8)), 4.0, 4.0),
        (assign(ACTOR, Layout(2, 4), *until(1, 32)), assign(ACTOR, Layout(4, 2), *until(1, 48)), 4.0, 8.0),
        (assign(ACTOR, Layout(1, 4), *until(1, 32)), assign(ACTOR, Layout(1, 2), *until(1, 48)), 16.0, 16.0),
        (assign(ACTOR, Layout(4, 8), *until(33, 64)), assign(ACTOR, Layout(8, 2), *until(33, 48)), 0.875, 3.0),
    ],
)
def test_bytes_moved_are_the_minimum_and_the_composition_costs_its_formula(
    before: Assignment, after: Assignment, minimum: float, composed: float
) -> None:
    assert in_copies(after, expand(plan(before))) == (minimum, minimum, composed)


def test_tp4_to_tp8_sends_every_new_device_one_eighth() -> None:
    schema = even(kinds=TRAINED)
    start = EMUSet(units(ACTOR, Layout(4), *range(4)))
    dag = compile(start, plan(assign(ACTOR, Layout(8), *range(8))), {ACTOR: schema}, {})
    traffic = execute(dag, {ACTOR: schema}, filled(start, {ACTOR: schema}))
    assert traffic.received_bytes == Counter(dict.fromkeys(range(4, 8), full_bytes(schema) // 8))
    assert traffic.sent_bytes == Counter(dict.fromkeys(range(4), full_bytes(schema) // 8))
