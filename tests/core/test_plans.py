"""Plans, the units that realise them, clusters and state: what is refused at construction."""

from __future__ import annotations

import pytest
from hypothesis import given

from nereus.core import (
    EMU,
    Assignment,
    Candidate,
    Capabilities,
    Cluster,
    Cut,
    Device,
    DeviceKind,
    EMUSet,
    Kind,
    Layout,
    Link,
    Partition,
    Pin,
    Plan,
    SettingsError,
    StateSchema,
    TensorSpec,
    Where,
    expand,
)
from tests.core.values import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REWARD_INFERENCE,
    cluster,
    plan,
    plans,
    unit,
)


def test_candidate_refuses_no_replica_and_no_micro_batch() -> None:
    with pytest.raises(SettingsError, match="dp 0"):
        Candidate(ACTOR_TRAINING, Layout(), dp=0)
    with pytest.raises(SettingsError, match="micro_batch 0"):
        Candidate(ACTOR_TRAINING, Layout(), dp=1, micro_batch=0)


def test_assignment_refuses_a_wrong_number_of_units() -> None:
    with pytest.raises(SettingsError, match="dp 2 needs 2 units, got 1"):
        Assignment(Candidate(ACTOR_TRAINING, Layout(), dp=2), ((0,),))


def test_assignment_refuses_a_wrong_number_of_devices() -> None:
    with pytest.raises(SettingsError, match=r"tp2 pp1 needs 2 devices, got \[0\]"):
        Assignment(Candidate(ACTOR_TRAINING, Layout(tp=2), dp=1), ((0,),))


@pytest.mark.parametrize("units", [((0, 1), (1, 2)), ((0, 0), (1, 2))])
def test_assignment_refuses_a_device_in_two_concurrent_units(units: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(SettingsError, match="two concurrent units"):
        Assignment(Candidate(ACTOR_TRAINING, Layout(tp=2), dp=2), units)


def test_plan_refuses_a_model_stage_twice() -> None:
    one = plan(actor_training=((0,),)).assignments[0]
    with pytest.raises(SettingsError, match="assigned twice"):
        Plan((one, one))


def test_plan_refuses_overlapping_partitions() -> None:
    left = Partition(frozenset({ACTOR_TRAINING}), frozenset({0, 1}))
    right = Partition(frozenset({CRITIC_TRAINING}), frozenset({1, 2}))
    with pytest.raises(SettingsError, match=r"partitions share devices \[1\]"):
        Plan(plan(actor_training=((0,),), critic_training=((2,),)).assignments, (left, right))


def test_plan_refuses_devices_outside_the_partition() -> None:
    part = Partition(frozenset({ACTOR_TRAINING}), frozenset({0}))
    with pytest.raises(SettingsError, match=r"uses \[1\] outside its partition"):
        Plan(plan(actor_training=((1,),)).assignments, (part,))


def test_model_stages_may_take_turns_on_a_device() -> None:
    shared = plan(actor_generation=((0,), (1,)), actor_training=((0, 1),))
    assert shared.devices == {0, 1}
    assert shared.model_stages == (ACTOR_GENERATION, ACTOR_TRAINING)
    with pytest.raises(KeyError, match="reward/inference"):
        shared.of(REWARD_INFERENCE)


def test_unit_refuses_a_wrong_count_and_a_device_twice() -> None:
    with pytest.raises(SettingsError, match="tp2 pp2 needs 4 devices"):
        EMU(ACTOR_TRAINING, Layout(2, 2), (0, 1))
    with pytest.raises(SettingsError, match="a device appears twice"):
        EMU(ACTOR_TRAINING, Layout(2), (1, 1))


def test_unit_positions_are_ordered_by_pp_rank_then_tp_rank() -> None:
    one = unit(5, 6, 7, 8, tp=2, pp=2)
    assert [one.position(device) for device in (5, 6, 7, 8)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert one.device(1, 0) == one.entry_device == 7


def test_units_of_one_model_stage_refuse_a_shared_device() -> None:
    with pytest.raises(SettingsError, match="device 1 is in two units of actor/training"):
        EMUSet((unit(0, 1, tp=2), unit(1, 2, tp=2)))


def test_units_of_different_model_stages_share_a_device() -> None:
    units = EMUSet((unit(0), unit(0, model_stage=CRITIC_TRAINING)))
    assert len(units.on(0)) == 2


def test_losing_a_device_loses_its_whole_units_only() -> None:
    units = EMUSet((unit(2, 3, tp=2), unit(0, 1, tp=2)))
    assert [u.devices for u in units.of(ACTOR_TRAINING)] == [(0, 1), (2, 3)]
    assert [u.devices for u in units.without_devices({3})] == [(0, 1)]


@given(plans())
def test_expanding_a_plan_keeps_every_unit(drawn: Plan) -> None:
    units = expand(drawn)
    assert units.devices == drawn.devices
    for assignment in drawn.assignments:
        found = units.of(assignment.candidate.model_stage)
        assert {unit.devices for unit in found} == set(assignment.units)
        assert all(unit.layout == assignment.candidate.layout for unit in found)


def test_cluster_refuses_repeated_ids_unknown_kinds_and_missing_links() -> None:
    kind = DeviceKind("cpu", 1, {}, 1.0)
    links = {"intra": Link(1, 0), "inter": Link(1, 0)}
    with pytest.raises(SettingsError, match="ids repeat"):
        Cluster((Device(0, 0, "cpu"), Device(0, 1, "cpu")), {"cpu": kind}, links)
    with pytest.raises(SettingsError, match=r"unknown device kinds \['gpu'\], valid: \['cpu'\]"):
        Cluster((Device(0, 0, "gpu"),), {"cpu": kind}, links)
    with pytest.raises(SettingsError, match="intra and inter"):
        Cluster((), {}, {"intra": Link(1, 0)})


def test_a_set_of_devices_talks_at_the_speed_of_its_slowest_link() -> None:
    four = cluster(4)
    assert four.link({0, 1}) == four.links["intra"]
    assert four.link({1, 2}) == four.links["inter"]


def test_a_cluster_shrinks_by_ids() -> None:
    assert cluster(4).without({1, 3}).ids == cluster(4).only({0, 2}).ids == (0, 2)


def test_capabilities_refuse_an_unknown_recompute_mode_and_default_to_free_pins() -> None:
    with pytest.raises(SettingsError, match="valid: none, selective, full"):
        Capabilities(recompute=("sometimes",))
    assert Capabilities().pin(ACTOR_TRAINING) == Pin()


def schema(*kinds: Kind) -> StateSchema:
    tensors = (
        TensorSpec("embed", (10, 4), Where.FIRST, cut=Cut(0, 10, padded=True)),
        TensorSpec("up", (8, 4), Where.LAYER, layer=0, cut=Cut(0, 8)),
        TensorSpec("norm", (4,), Where.LAST),
    )
    return StateSchema(1, tensors, dict.fromkeys(kinds, "fp32"))


def test_state_needs_parameters_and_known_dtypes() -> None:
    with pytest.raises(SettingsError, match="'param' is missing"):
        schema(Kind.EXP_AVG)
    with pytest.raises(SettingsError, match="int3"):
        StateSchema(1, (), {Kind.PARAM: "int3"})


def test_stored_bytes_count_padding_and_every_kind() -> None:
    two = unit(0, 1, 2, tp=3)
    state = schema(Kind.PARAM, Kind.EXP_AVG)
    # embed: ceil(10 / 3) = 4 rows of 4; up: 3, 3, 2 rows of 4; norm: 4, on every tp rank. 4 bytes, two kinds.
    assert [state.stored_bytes(two, device) for device in (0, 1, 2)] == [
        (4 * 4 + 3 * 4 + 4) * 8,
        (4 * 4 + 3 * 4 + 4) * 8,
        (4 * 4 + 2 * 4 + 4) * 8,
    ]
