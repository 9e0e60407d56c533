"""The order of a transition: forwarding, memory, staging in host memory, the bound, and feasibility by brute force."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import ceil, log2

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nereus.core import (
    EMU,
    Destroy,
    EdgeKind,
    EMUSet,
    Extend,
    InfeasibleError,
    Layout,
    Offload,
    SettingsError,
    TransitionDAG,
    expand,
)
from nereus.engine.transports.memory import execute
from nereus.transition import compile, connect, fit, peak_bytes, stored_bytes
from nereus.transition.budget import Budget
from nereus.transition.decompose import decompose
from nereus.transition.lead import Lead
from nereus.transition.schedule import IN_PLACE, Memory, schedule
from nereus.transition.site import Site
from tests.oracles.brute_force_orders import an_order_exists
from tests.oracles.shortest_orders import shortest_bytes
from tests.support.models import ACTOR, CRITIC, REWARD, ROLLOUT, TRAINED, assign, even, full_bytes, plan, units
from tests.support.small import SCHEMAS, full, random_case
from tests.support.worlds import assert_holds, filled


def sends(dag: TransitionDAG) -> Counter[EMU]:
    """Unit → groups that read it."""
    return Counter(source for step in dag.primitives if isinstance(step, Extend) for source in step.sources)


@pytest.mark.parametrize(
    ("layers", "old", "new", "count"),
    [(6, Layout(1, 2), Layout(1, 3), 2), (6, Layout(2), Layout(1, 3), 4), (5, Layout(1), Layout(1, 2), 3)],
)
def test_small_units_that_each_feed_a_larger_one_are_not_below_the_bound(
    layers: int, old: Layout, new: Layout, count: int
) -> None:
    schema = even(layers=layers, rows=12, columns=2)
    free = count * old.size
    start = EMUSet(units(ACTOR, old, *range(free)))
    dag = compile(start, plan(assign(ACTOR, new, *range(free, free + count * new.size))), {ACTOR: schema})
    assert dag.span_bytes == full_bytes(schema) // old.size  # all at the same time: no second round
    assert dag.certified


@settings(max_examples=80, deadline=None)
@given(st.integers(5, 8), *[st.tuples(st.integers(1, 3), st.integers(1, 3))] * 2, st.integers(1, 3), st.integers(1, 3))
@example(5, (2, 1), (3, 3), 2, 2)  # received is more than the first would take of all senders
def test_no_bound_is_above_replicas_that_are_all_made_at_once(
    layers: int, old: tuple[int, int], new: tuple[int, int], copies: int, each: int
) -> None:
    schema, held, wanted = even(layers, 24, 2), Layout(*old), Layout(*new)
    free = copies * each * held.size
    start = EMUSet(units(ACTOR, held, *range(free)))
    goal = EMUSet(units(ACTOR, wanted, *range(free, free + copies * wanted.size)))
    dag = connect(start, goal, {ACTOR: schema})
    received = max(stored_bytes(goal, {ACTOR: schema}).values())
    assert dag.bound_bytes <= round(max(received, full_bytes(schema) / (each * held.size)))


@pytest.mark.parametrize("copies", [2, 3, 4, 5, 8, 13])
def test_new_replicas_forward_in_a_doubling_tree(copies: int) -> None:
    start, goal = EMUSet(units(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(1), *range(copies)))
    dag = compile(start, goal, SCHEMAS)
    (first,) = start
    assert max(sends(dag).values()) == sends(dag)[first] == ceil(log2(copies))
    one = dag.span_bytes / ceil(log2(copies))
    assert one == stored_bytes(start, SCHEMAS)[0]
    assert dag.certified
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world)
    assert_holds(world, dag.goal, SCHEMAS)


def test_a_forwarded_copy_waits_for_the_commit_of_the_group_that_makes_it() -> None:
    dag = compile(EMUSet(units(ACTOR, Layout(2), 0, 1)), plan(assign(ACTOR, Layout(2), *range(8))), SCHEMAS)
    made = {target: step for step in dag.primitives for target in step.targets}
    forwarded = [step for step in dag.primitives if step.sources[0] in made]
    assert forwarded
    edges = {(edge.earlier, edge.later, edge.kind) for edge in dag.edges}
    for step in forwarded:
        assert (made[step.sources[0]].id, step.id, EdgeKind.STATE) in edges


def test_units_leave_at_once_where_a_copy_elsewhere_stays_and_the_one_that_is_read_after_that() -> None:
    start = EMUSet(units(ACTOR, Layout(1), 0, 1))
    gone = decompose(start.of(ACTOR), (), SCHEMAS[ACTOR], elsewhere=True)
    dag = schedule(start, EMUSet(()), {IN_PLACE: [gone]}, Memory({}, {}, {}))
    assert [step.sources for step in dag.primitives] == [(unit,) for unit in start]
    goal = EMUSet(units(ACTOR, Layout(1), 2, 3))
    moved = decompose(start.of(ACTOR), goal.of(ACTOR), SCHEMAS[ACTOR], sub=Layout(1), elsewhere=True)
    full_of_old = stored_bytes(start, SCHEMAS)
    dag = schedule(start, goal, {IN_PLACE: [moved]}, Memory(full_of_old, full_of_old, {}))
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world)
    assert_holds(world, goal, SCHEMAS)


def test_goal_units_that_share_a_unit_to_read_may_be_made_one_by_one_for_less_than_the_most_of_them() -> None:
    schemas = SCHEMAS | {ACTOR: even(layers=4, rows=12, columns=1, kinds=TRAINED)}
    held = [assign(ROLLOUT, Layout(1), 0), assign(REWARD, Layout(1), 0)]
    start = expand(plan(*held, assign(ACTOR, Layout(1, 3), *range(6))))
    goal = expand(plan(held[0], assign(REWARD, Layout(1), 0, 1), assign(ACTOR, Layout(1, 2), *range(4))))
    shortest = shortest_bytes(start, goal, schemas, {})
    assert shortest is not None
    assert connect(start, goal, schemas).bound_bytes <= shortest


def test_a_device_sends_whole_pieces_or_nothing() -> None:
    """Devices 0 and 1 change the reward between them and have to send the rollout as well; 2 and 3 have no time to."""
    start = expand(plan(assign(ROLLOUT, Layout(1), 0, 1), assign(REWARD, Layout(2), 0, 1)))
    goal = expand(plan(assign(ROLLOUT, Layout(1), 0, 1, 2, 3), assign(REWARD, Layout(1, 2), 0, 1)))
    dag = connect(start, goal, SCHEMAS)
    assert dag.span_bytes == full_bytes(SCHEMAS[ROLLOUT]) + full_bytes(SCHEMAS[REWARD]) // 4
    assert dag.certified


def test_nothing_is_forwarded_where_the_units_of_the_start_suffice() -> None:
    start = EMUSet(units(ACTOR, Layout(2), *range(8)))
    dag = compile(start, plan(assign(ACTOR, Layout(2), *range(16))), SCHEMAS)
    assert set(sends(dag)) == set(start)
    assert set(sends(dag).values()) == {1}
    assert dag.certified


def test_a_large_unit_serves_several_small_ones_at_once() -> None:
    """Eight devices hold one copy; four units of two devices receive it as fast as one would."""
    goal = plan(assign(ACTOR, Layout(2), *range(8, 16)))
    dag = compile(EMUSet(units(ACTOR, Layout(4, 2), *range(8))), goal, SCHEMAS)
    (extend,) = [step for step in dag.primitives if isinstance(step, Extend)]
    assert len(extend.targets) == 4
    assert dag.certified
    world = filled(dag.start, SCHEMAS)
    execute(dag, SCHEMAS, world)
    assert_holds(world, dag.goal, SCHEMAS)


def test_small_units_send_to_a_large_one_together() -> None:
    start = EMUSet(units(ACTOR, Layout(1), *range(4)))
    dag = compile(start, plan(assign(ACTOR, Layout(4), *range(8, 12))), SCHEMAS)
    (extend,) = [step for step in dag.primitives if isinstance(step, Extend)]
    assert set(extend.sources) == set(start)
    assert dag.span_bytes == stored_bytes(dag.goal, SCHEMAS)[8]


def test_one_copy_crosses_a_slow_link_and_the_others_are_made_from_it() -> None:
    node_of = {device: device // 4 for device in range(8)}
    start = EMUSet(units(ACTOR, Layout(1), 0))
    goal = EMUSet(units(ACTOR, Layout(1), 0, 4, 5, 6, 7))
    dag = connect(start, goal, SCHEMAS, site=Site(node_of, far=4.0))
    crossing = [
        step
        for step in dag.primitives
        if {node_of[device] for unit in step.sources for device in unit.devices}
        != {node_of[device] for unit in step.targets for device in unit.devices}
    ]
    assert len(crossing) == 1
    assert dag.span_bytes == (4 + 1 + 1) * stored_bytes(start, SCHEMAS)[0]


SWAP = (
    expand(plan(assign(ROLLOUT, Layout(1), 0), assign(REWARD, Layout(1), 1))),
    expand(plan(assign(ROLLOUT, Layout(1), 1), assign(REWARD, Layout(1), 0))),
)


def test_only_copies_that_have_to_swap_full_devices_go_through_host_memory() -> None:
    start, goal = SWAP
    node_of, capacity = {0: 0, 1: 0}, full(start, goal)
    dag = connect(
        start,
        goal,
        SCHEMAS,
        Budget(capacity, host_bytes={0: sum(stored_bytes(start, SCHEMAS).values())}),
        Site(node_of),
    )
    (offload,) = [step for step in dag.primitives if isinstance(step, Offload)]
    assert dag.primitives[0] is offload
    assert offload.hosts == offload.releases
    (destroy,) = [s for s in dag.primitives if isinstance(s, Destroy) and s.sources == offload.sources]
    assert not destroy.releases, "the device bytes went with the Offload"
    world = filled(start, SCHEMAS)
    traffic = execute(dag, SCHEMAS, world, capacity)
    assert_holds(world, goal, SCHEMAS)
    assert not world.staged
    assert all(traffic.peak_bytes[device] <= capacity[device] for device in capacity)


def test_nothing_is_staged_where_another_order_exists() -> None:
    start, goal = SWAP
    roomy = {device: 2 * size for device, size in full(start, goal).items()}
    dag = connect(start, goal, SCHEMAS, Budget(roomy, host_bytes={0: 10**9}), Site({0: 0, 1: 0}))
    assert not [step for step in dag.primitives if isinstance(step, Offload)]


@pytest.mark.parametrize("host", [{}, {0: 1}, {1: 10**9}])
def test_without_enough_host_memory_the_swap_is_refused_with_the_reason(host: dict[int, int]) -> None:
    start, goal = SWAP
    with pytest.raises(InfeasibleError, match="every order of the steps was ruled out") as caught:
        connect(start, goal, SCHEMAS, Budget(full(start, goal), host_bytes=host), Site({0: 0, 1: 0}))
    assert caught.value.short_bytes


def test_a_staged_unit_is_not_split_on_its_devices() -> None:
    """A piece of its Split would be called like the goal unit on devices 0 and 1, which another group builds."""
    start = expand(
        plan(assign(ROLLOUT, Layout(2, 2), 2, 0, 4, 1), assign(REWARD, Layout(2), 1, 3), assign(ACTOR, Layout(2), 1, 0))
    )
    goal = expand(
        plan(
            assign(ROLLOUT, Layout(1, 2), 0, 1, 3, 4),
            assign(REWARD, Layout(1, 4), 0, 3, 1, 5),
            assign(ACTOR, Layout(1), 1, 3, 4),
        )
    )
    capacity = {device: int(1.05 * size) for device, size in full(start, goal).items()}
    dag = connect(start, goal, SCHEMAS, Budget(capacity, host_bytes={0: 10**9}), Site(dict.fromkeys(capacity, 0)))
    assert {step.sources[0].model_stage for step in dag.primitives if isinstance(step, Offload)} == {ROLLOUT}
    assert not [step for step in dag.primitives if step.model_stage == ROLLOUT and step.name == "Split"]
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world, capacity)
    assert_holds(world, goal, SCHEMAS)


def test_an_offload_is_of_one_unit_and_names_all_its_devices() -> None:
    (unit,) = units(ACTOR, Layout(2), 0, 1)
    with pytest.raises(SettingsError, match="host bytes of devices"):
        Offload("o", (unit,), (), "o", hosts={0: 5})


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
@example(357750)  # a unit of a model-stage that keeps another makes the room
def test_a_target_is_infeasible_only_if_no_order_exists_and_then_staging_leads_there(seed: int) -> None:
    start, goal, capacity = random_case(seed)
    if an_order_exists(start, goal, SCHEMAS, capacity):
        dag = connect(start, goal, SCHEMAS, Budget(capacity))
    else:
        with pytest.raises(InfeasibleError, match="every order of the steps was ruled out"):
            connect(start, goal, SCHEMAS, Budget(capacity))
        dag = connect(start, goal, SCHEMAS, Budget(capacity, host_bytes={0: 10**9}), Site(dict.fromkeys(capacity, 0)))
        assert any(isinstance(step, Offload) for step in dag.primitives)
    assert dag.bound_bytes <= dag.span_bytes
    world = filled(start, SCHEMAS)
    traffic = execute(dag, SCHEMAS, world, capacity)
    assert_holds(world, goal, SCHEMAS)
    assert traffic.peak_bytes == {device: peak_bytes(dag, SCHEMAS).get(device, 0) for device in traffic.peak_bytes}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 4.0]))
def test_nodes_and_links_change_the_order_and_not_the_end(seed: int, ratio: float) -> None:
    start, goal, _ = random_case(seed)
    node_of = {device: device // 3 for device in start.devices | goal.devices}
    there = connect(start, goal, SCHEMAS, site=Site(node_of, far=ratio))
    back = connect(goal, start, SCHEMAS, site=Site(node_of, far=ratio))
    world = filled(start, SCHEMAS)
    for dag in (there, back):
        assert dag.bound_bytes <= dag.span_bytes
        execute(dag, SCHEMAS, world)
        assert_holds(world, dag.goal, SCHEMAS)


def another_order(dag: TransitionDAG, rng: random.Random) -> TransitionDAG:
    """The same primitives in a random order that the edges allow; those of one group stay in theirs."""
    before, left, order = dag.predecessors(), list(dag.primitives), []
    for steps in dag.groups.values():
        for earlier, later in pairwise(steps):
            before[later.id].add(earlier.id)
    done: set[str] = set()
    while left:
        step = rng.choice([step for step in left if before[step.id] <= done])
        left.remove(step)
        order.append(step)
        done.add(step.id)
    return replace(dag, primitives=tuple(order))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_every_order_that_the_edges_allow_fits_and_keeps_a_copy(seed: int, staging: bool) -> None:
    start, goal, capacity = random_case(seed)
    host = {0: 10**9} if staging else {}
    try:
        dag = connect(start, goal, SCHEMAS, Budget(capacity, host_bytes=host), Site(dict.fromkeys(capacity, 0)))
    except InfeasibleError:
        return
    dag = another_order(dag, random.Random(seed))
    groups = {name: len(steps) for name, steps in dag.groups.items()}
    whole, built = set(start), dict.fromkeys(groups, frozenset[EMU]())
    for step in dag.primitives:
        if isinstance(step, Destroy):
            whole.remove(step.sources[0])
            assert any(unit.model_stage == step.model_stage for unit in whole), f"{step.id} takes the last copy"
        elif step.group in groups:
            built[step.group] |= set(step.targets) & set(goal)
            groups[step.group] -= 1
            whole |= set() if groups[step.group] else built[step.group]
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world, capacity)
    assert_holds(world, goal, SCHEMAS)


def test_buffers_for_receiving_count_and_are_free_afterwards() -> None:
    start, goal = EMUSet(units(ACTOR, Layout(1), 0)), EMUSet(units(ACTOR, Layout(1), 0, 1))
    size = stored_bytes(start, SCHEMAS)[0]
    dag = connect(start, goal, SCHEMAS, Budget({1: size + 64}, buffer_bytes=64))
    assert fit(dag, SCHEMAS, {1: size + 64}, buffer_bytes=64)[1] == size + 64
    with pytest.raises(InfeasibleError, match="device 1 is 1 bytes short"):
        connect(start, goal, SCHEMAS, Budget({1: size + 63}, buffer_bytes=64))


def test_a_replica_stays_to_be_read_where_memory_forces_the_units_in_place_out() -> None:
    """Old and new shards do not fit side by side on devices 0 and 1, and another model-stage wants device 2."""
    start = expand(plan(assign(ROLLOUT, Layout(1), 0, 1, 2), assign(REWARD, Layout(1), 3)))
    goal = expand(plan(assign(ROLLOUT, Layout(2), 0, 1), assign(REWARD, Layout(1), 2, 3)))
    dag = connect(start, goal, SCHEMAS, Budget(full(start, goal)))
    (extend,) = [s for s in dag.primitives if isinstance(s, Extend) and s.model_stage == ROLLOUT]
    assert [unit.devices for unit in extend.sources] == [(2,)]
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world, full(start, goal))
    assert_holds(world, goal, SCHEMAS)


def test_what_left_before_it_could_be_read_is_received_in_full() -> None:
    """No room for old and new side by side: each place is cleared and built from the other one's unit."""
    start = EMUSet(units(ACTOR, Layout(2), *range(4)))
    goal = EMUSet(units(ACTOR, Layout(1, 2), *range(4)))
    dag = connect(start, goal, SCHEMAS, Budget(full(start, goal)))
    assert dag.span_bytes == 2 * max(stored_bytes(goal, SCHEMAS).values())
    assert dag.certified  # the last to leave does so after the first has been built
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world, full(start, goal))
    assert_holds(world, goal, SCHEMAS)


def test_a_device_without_a_node_is_alone_on_its_own() -> None:
    start, goal = EMUSet(units(ACTOR, Layout(1), 0)), EMUSet(units(ACTOR, Layout(1), 0, 1))
    size = full_bytes(SCHEMAS[ACTOR])
    spans = [
        connect(start, goal, SCHEMAS, site=Site(nodes, far=4.0)).span_bytes for nodes in ({0: 0, 1: 0}, {0: 0}, {7: 0})
    ]
    assert spans == [size, 4 * size, 4 * size]


def test_a_model_stage_that_keeps_nothing_names_it() -> None:
    with pytest.raises(InfeasibleError, match="critic/training: no unit exists"):
        connect(EMUSet(()), EMUSet(units(CRITIC, Layout(1), 0)), {CRITIC: even()})


def test_a_group_falls_apart_where_what_it_still_reads_would_send_for_longer_than_it_receives() -> None:
    old = units(ACTOR, Layout(1, 4), *range(8))
    new = [EMU(ACTOR, Layout(1, 2), devices) for devices in ((0, 1), (3, 4))]
    local = decompose(old, new, even(layers=4, rows=12, columns=2))
    (tied,) = local.builds
    assert local.drop(tied, old[0]) == []  # what the other four devices send is no more than each receives
    apart = local.drop(tied, old[1])
    assert [(group.goals, group.sources) for group in apart] == [((goal,), ()) for goal in new]
    assert sum(group.moved_bytes for group in apart) == tied.moved_bytes
    assert len({tied.name, *(group.name for group in apart)}) == 1 + len(new)


def test_groups_that_fell_apart_are_built_within_memory_and_as_the_goal_says() -> None:
    start, goal, capacity = random_case(220)
    dag = connect(start, goal, SCHEMAS, Budget(capacity))
    tied = sum(len(decompose(start.of(ms), goal.of(ms), SCHEMAS[ms]).builds) for ms in goal.model_stages)
    assert len({step.group for step in dag.primitives if not isinstance(step, Destroy)}) > tied
    assert all(peak <= capacity[device] for device, peak in peak_bytes(dag, SCHEMAS).items())
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world)
    assert_holds(world, goal, SCHEMAS)


def test_a_lead_leaves_units_to_be_read_where_it_builds_nothing() -> None:
    first, second, third = units(ACTOR, Layout(1, 2), *range(6))
    lead = Lead((), (first, second, (ACTOR, frozenset({2, 4})), third))
    assert list(lead.unread) == [second]
