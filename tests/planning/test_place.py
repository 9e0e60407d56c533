"""Devices of units, and the cuts of the pool."""

from __future__ import annotations

from nereus.core import Capabilities, Layout, ModelStage, Pin, Stage
from nereus.planning.arrange import arrangements
from nereus.planning.place import place, pool_order
from tests.cost.jobs import ACTOR, CRITIC, GENERATION, REFERENCE, REWARD, cluster, colocated, grpo

FIVE = (GENERATION, REFERENCE, REWARD, ACTOR, CRITIC)


def test_replicas_are_packed_and_tp_groups_stay_inside_nodes() -> None:
    assert place(Layout(2, 1), 2, [0, 0, 0, 1, 1, 1]) == ((0, 1), (3, 4))
    assert place(Layout(2, 2), 1, [0, 0, 0, 1, 1, 1]) == ((0, 1, 3, 4),)
    assert place(Layout(2, 1), 3, [0, 0, 0, 1, 1, 1]) is None
    assert place(Layout(1, 3), 2, [0] * 6) == ((0, 1, 2), (3, 4, 5))


def test_devices_in_use_come_first() -> None:
    current = colocated(grpo(), dp=2)
    moved = cluster(5).without([0])
    assert pool_order(moved, None) == (1, 2, 3, 4)
    assert pool_order(cluster(4), current) == (0, 1, 2, 3)
    assert pool_order(moved, current) == (1, 2, 3, 4)


def test_colocated_generation_against_rest_and_disjoint_models_are_tried() -> None:
    pool = tuple(range(4))
    tried = [arrangement.windows for arrangement in arrangements(FIVE, pool, Capabilities())]
    assert dict.fromkeys(FIVE, pool) in tried
    assert {ms: pool[:1] if ms == GENERATION else pool[1:] for ms in FIVE} in tried
    halves = dict.fromkeys(FIVE, pool) | {
        REFERENCE: pool[:2], REWARD: pool[2:], ACTOR: pool[:3], CRITIC: pool[3:],
    }  # fmt: skip
    assert halves in tried
    assert halves | {REFERENCE: pool[2:], REWARD: pool[:2]} in tried
    assert len(tried) == len({tuple(windows[ms] for ms in FIVE) for windows in tried})


def test_partitions_are_disjoint_and_hold_their_model_stages() -> None:
    for arrangement in arrangements(FIVE, tuple(range(5)), Capabilities()):
        seen: set[int] = set()
        for partition in arrangement.partitions:
            assert not seen & partition.devices
            seen |= partition.devices
            for model_stage in partition.model_stages:
                assert set(arrangement.windows[model_stage]) <= partition.devices
        assert not arrangement.partitions or seen == set(range(5))


def test_pinned_devices_are_a_window_of_their_own() -> None:
    able = Capabilities(pins={REWARD: Pin(devices=(4, 2))})
    windows = [arrangement.windows for arrangement in arrangements(FIVE, tuple(range(5)), able)]
    assert {found[REWARD] for found in windows} == {(2, 4)}


def test_three_models_of_one_stage_share_a_window_in_every_way() -> None:
    models = tuple(ModelStage(name, Stage.INFERENCE) for name in ("a", "b", "c"))
    pool = (0, 1, 2)
    windows = [tuple(found.windows[ms] for ms in models) for found in arrangements(models, pool, Capabilities())]
    assert ((0, 1, 2),) * 3 in windows
    assert ((0,), (1,), (2,)) in windows
    assert ((0, 1), (0, 1), (2,)) in windows
    assert ((0,), (1, 2), (1, 2)) in windows
