"""Decomposition, schedule, memory and estimates of single transitions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest

from nereus.core import (
    Calibration,
    Destroy,
    EdgeKind,
    EMUSet,
    InfeasibleError,
    Layout,
    Plan,
    SettingsError,
    TransitionDAG,
    TransitionError,
    expand,
)
from nereus.engine.transports.memory import execute
from nereus.transition import compile, connect, estimate, fit, peak_bytes, stored_bytes
from nereus.transition.budget import Budget
from nereus.transition.site import Site
from tests.support.models import ACTOR, CRITIC, REWARD, ROLLOUT, assign, decoder, even, full_bytes, plan, units
from tests.support.small import CLUSTER
from tests.support.worlds import assert_holds, filled

SCHEMAS = {ACTOR: decoder(), CRITIC: decoder(scalar=True), ROLLOUT: decoder(), REWARD: decoder()}


def stored(device: int, *sets: EMUSet) -> int:
    return sum(stored_bytes(units, SCHEMAS)[device] for units in sets)


def test_a_plan_that_exists_needs_nothing() -> None:
    same = plan(assign(ACTOR, Layout(2, 2), *range(4)))
    dag = compile(expand(same), same, SCHEMAS)
    assert dag.primitives == ()
    found = estimate(dag, SCHEMAS, CLUSTER, Calibration(transition_overhead_s=9.0))
    assert (found.seconds, found.moved_bytes, found.critical_path) == (0.0, 0, ())


def test_a_model_stage_without_units_cannot_be_reached() -> None:
    with pytest.raises(InfeasibleError, match="critic/training: no unit exists"):
        compile(
            EMUSet(units(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(1), 0), assign(CRITIC, Layout(1), 1)), SCHEMAS
        )


def test_the_last_copy_of_a_model_stage_is_not_given_up() -> None:
    start = EMUSet((*units(ACTOR, Layout(1), 0), *units(CRITIC, Layout(1), 1)))
    with pytest.raises(TransitionError, match="its last copy would be destroyed"):
        compile(start, plan(assign(ACTOR, Layout(1), 0)), SCHEMAS)


def test_a_unit_that_moves_away_is_destroyed_after_it_was_copied() -> None:
    start = EMUSet(units(ACTOR, Layout(2), 0, 1))
    dag = compile(start, plan(assign(ACTOR, Layout(2), 2, 3)), SCHEMAS)
    assert [step.name for step in dag.primitives] == ["Extend", "Destroy"]
    assert [(e.earlier, e.later, e.kind) for e in dag.edges] == [
        (dag.primitives[0].id, dag.primitives[1].id, EdgeKind.STATE)
    ]


def test_a_merge_commits_before_any_of_its_sources_goes() -> None:
    start = EMUSet(units(ACTOR, Layout(1), 0, 1, 2))
    dag = compile(start, plan(assign(ACTOR, Layout(2), 0, 1)), SCHEMAS)
    first = dag.primitives[0]
    assert isinstance(first, Destroy)
    assert first.sources[0].devices == (2,)
    assert [step.name for step in dag.primitives] == ["Destroy", "Merge", "Destroy", "Destroy"]


def test_acquired_less_released_is_the_change_of_what_is_stored() -> None:
    start = plan(assign(ACTOR, Layout(2, 2), *range(4)), assign(CRITIC, Layout(1, 2), 0, 1))
    goal = plan(assign(ACTOR, Layout(4), 1, 3, 5, 7), assign(CRITIC, Layout(1, 2), 1, 2, 3, 0))
    dag = compile(expand(start), goal, SCHEMAS)
    for device in dag.devices:
        change = sum(s.acquires.get(device, 0) - s.releases.get(device, 0) for s in dag.primitives)
        assert change == stored(device, dag.goal) - stored(device, dag.start)


SWAP_START = plan(assign(ROLLOUT, Layout(1), 0), assign(REWARD, Layout(1), 1))
SWAP_GOAL = plan(assign(ROLLOUT, Layout(1), 1), assign(REWARD, Layout(1), 0))


def test_two_only_copies_cannot_swap_full_devices() -> None:
    start = expand(SWAP_START)
    full = {0: stored(0, start), 1: stored(1, start)}
    with pytest.raises(InfeasibleError, match=r"device 1 is .* bytes short") as caught:
        compile(start, SWAP_GOAL, SCHEMAS, Budget(full))
    assert caught.value.short_bytes == {1: full[1]}


def test_they_can_when_one_device_has_room_for_both() -> None:
    start = expand(SWAP_START)
    limits = {0: stored(0, start), 1: 2 * stored(1, start)}
    dag = compile(start, SWAP_GOAL, SCHEMAS, Budget(limits))
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world, limits)
    assert_holds(world, dag.goal, SCHEMAS)
    (edge,) = [edge for edge in dag.edges if edge.kind is EdgeKind.RESOURCE]
    assert (edge.earlier, edge.later) == ("actor/generation/destroy0", "reward/inference/0/extend0")


def test_a_redundant_unit_gives_way_when_memory_is_short() -> None:
    """Old and new do not fit side by side on device 1, but device 0 holds a copy to build from."""
    start, goal = EMUSet(units(ACTOR, Layout(1), 0, 1)), plan(assign(ACTOR, Layout(2), 1, 2))
    dag = compile(start, goal, SCHEMAS, Budget({1: stored(1, start)}))
    assert dag.primitives[0].name == "Destroy"
    assert dag.primitives[0].sources[0].devices == (1,)
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world, {1: stored(1, start)})
    assert_holds(world, dag.goal, SCHEMAS)


def test_what_else_is_in_use_counts() -> None:
    start, goal = EMUSet(units(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(1), 0, 1))
    room = {1: stored(0, start) + 10}
    assert compile(start, goal, SCHEMAS, Budget(room, {1: 10})).primitives
    with pytest.raises(InfeasibleError, match="device 1 is 1 bytes short") as caught:
        compile(start, goal, SCHEMAS, Budget(room, {1: 11}))
    assert caught.value.short_bytes == {1: 1}


def test_fit_reports_peaks_and_names_the_device_that_is_short() -> None:
    start = EMUSet(units(ACTOR, Layout(1), 0, 1))
    dag = compile(start, plan(assign(ACTOR, Layout(2), 0, 1)), SCHEMAS)
    peaks = peak_bytes(dag, SCHEMAS)
    assert fit(dag, SCHEMAS, peaks) == peaks
    with pytest.raises(InfeasibleError, match="on device 1, 5 more than its capacity") as caught:
        fit(dag, SCHEMAS, {**peaks, 1: peaks[1] - 5})
    assert caught.value.short_bytes == {1: 5}


def test_stage_order_breaks_ties() -> None:
    start = expand(plan(assign(ACTOR, Layout(1), 0), assign(ROLLOUT, Layout(1), 1), assign(REWARD, Layout(1), 2)))
    goal = plan(assign(ACTOR, Layout(1), 0, 3), assign(ROLLOUT, Layout(1), 1, 4), assign(REWARD, Layout(1), 2, 5))
    dag = compile(start, goal, SCHEMAS)
    assert [step.model_stage for step in dag.primitives] == [ROLLOUT, REWARD, ACTOR]


def test_a_half_done_transition_is_just_another_start() -> None:
    half = EMUSet((*units(ACTOR, Layout(2, 1), 0, 1), *units(ACTOR, Layout(1, 2), 2, 3)))
    dag = compile(half, plan(assign(ACTOR, Layout(1, 2), *range(4))), SCHEMAS)
    assert half.units[1] in dag.goal.units
    world = filled(half, SCHEMAS)
    execute(dag, SCHEMAS, world)
    assert_holds(world, dag.goal, SCHEMAS)


def run(start: Plan, goal: Plan) -> TransitionDAG:
    return compile(expand(start), goal, {ACTOR: even()})


def test_seconds_are_overhead_and_scaled_critical_path() -> None:
    dag = run(plan(assign(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(1), 0, 1)))
    plain = estimate(dag, {ACTOR: even()}, CLUSTER, Calibration())
    assert plain.link_bytes == {"intra": full_bytes(even()), "inter": 0}
    assert plain.seconds > full_bytes(even()) / 1e6
    learnt = estimate(dag, {ACTOR: even()}, CLUSTER, Calibration(transition_scale=3.0, transition_overhead_s=0.5))
    assert learnt.seconds == pytest.approx(0.5 + 3 * plain.seconds)


def test_a_slower_link_and_a_shared_sender_take_longer() -> None:
    near = run(plan(assign(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(1), 0, 1)))
    far = run(plan(assign(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(1), 0, 4)))
    both = run(plan(assign(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(1), 0, 1, 2)))
    times = [estimate(dag, {ACTOR: even()}, CLUSTER, Calibration()) for dag in (near, far, both)]
    assert times[0].seconds < times[1].seconds
    assert times[0].seconds < times[2].seconds
    assert times[1].link_bytes["inter"] == full_bytes(even())
    assert len(times[2].critical_path) == 2


def test_disjoint_model_stages_overlap_in_time() -> None:
    schemas = {ACTOR: even(), CRITIC: even()}
    one = plan(assign(ACTOR, Layout(1), 0), assign(CRITIC, Layout(1), 2))
    both = compile(expand(one), plan(assign(ACTOR, Layout(1), 0, 1), assign(CRITIC, Layout(1), 2, 3)), schemas)
    single = compile(expand(one), plan(assign(ACTOR, Layout(1), 0, 1), assign(CRITIC, Layout(1), 2)), schemas)
    times = [estimate(dag, schemas, CLUSTER, Calibration()).seconds for dag in (both, single)]
    assert times[0] == pytest.approx(times[1])


def test_positions_can_be_given_instead_of_a_plan() -> None:
    start = EMUSet(units(ACTOR, Layout(2), 0, 1))
    swapped = EMUSet((replace(start.units[0], devices=(1, 0)),))
    dag = connect(start, swapped, SCHEMAS)
    assert [step.name for step in dag.primitives] == ["Merge", "Destroy"]
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world)
    assert_holds(world, swapped, SCHEMAS)


@pytest.mark.parametrize("budget", [Budget(), Budget({0: 1 << 40})])
def test_a_model_stage_without_a_schema_is_named(budget: Budget) -> None:
    start, goal = plan(assign(ACTOR, Layout(1), 0)), plan(assign(ACTOR, Layout(2), 0, 1))
    expected = re.escape("no state schema of actor/training is given, only of: critic/training")
    with pytest.raises(SettingsError, match=expected):
        connect(expand(start), expand(goal), {CRITIC: even()}, budget)
    with pytest.raises(SettingsError, match=expected):
        compile(expand(start), goal, {CRITIC: even()}, budget)
    with pytest.raises(SettingsError, match="only of: no model-stage"):
        connect(expand(start), expand(goal), {}, budget)
    assert connect(expand(start), expand(start), {}).idle


def test_a_split_is_relieved_by_replicas_when_its_unit_would_send_too_much() -> None:
    start = EMUSet(units(ACTOR, Layout(1, 2), 0, 3, 5, 4, 1, 2, 8, 7))
    dag = connect(start, EMUSet(units(ACTOR, Layout(1), 6, 8)), SCHEMAS)
    world = filled(start, SCHEMAS)
    sent = execute(dag, SCHEMAS, world).sent_bytes
    assert max(sent.values()) <= 1.5 * sent.total() / len(sent)
    assert_holds(world, dag.goal, SCHEMAS)


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        (lambda: Budget({3: -1}), "capacity of 3 is -1"),
        (lambda: Budget({}, {3: -1}), "other_bytes of 3 is -1"),
        (lambda: Budget({}, {}, {0: -8}), "host_bytes of 0 is -8"),
        (lambda: Budget({}, {}, {}, -2), "buffer_bytes is -2"),
    ],
)
def test_a_size_of_memory_that_is_none_is_refused(budget: Callable[[], Budget], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        budget()


@pytest.mark.parametrize("far", [nan, inf, -1.0, 0.0, 0.5, True])
def test_nodes_are_at_least_as_far_apart_as_devices(far: float) -> None:
    with pytest.raises(SettingsError, match=f"site: far {far} must be a number of at least 1 and at most 1e.30"):
        Site(far=far)
    if far != 0.0:
        with pytest.raises(SettingsError, match=f"site: bytes_per_s {far} must be a number of at least"):
            Site(bytes_per_s=far)
