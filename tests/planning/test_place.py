"""Devices of units, shapes of the pool, and packing into nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import Assignment, Candidate, Capabilities, Cluster, Device, Layout, ModelStage, Stage
from nereus.cost.rows import Rows
from nereus.planning.grid import Grids
from nereus.planning.place import place
from nereus.planning.pool import whole
from nereus.planning.problem import Problem
from nereus.planning.space import cuts, shapes
from tests.cost.jobs import ACTOR, CRITIC, GENERATION, REFERENCE, REWARD, SMALL, WORKLOAD, cluster, colocated, grpo

FIVE = (GENERATION, REFERENCE, REWARD, ACTOR, CRITIC)


def units(nodes: Sequence[tuple[int, ...]], tp: int, pp: int, dp: int, cp: int = 1) -> tuple[tuple[int, ...], ...]:
    return place(Candidate(ACTOR, Layout(tp, pp), dp, cp=cp), nodes)


def test_replicas_are_packed_and_tp_groups_stay_inside_nodes() -> None:
    nodes = [(0, 1, 2), (3, 4, 5)]
    assert units(nodes, 2, 1, 2) == ((0, 1), (3, 4))
    assert units(nodes, 2, 2, 1) == ((0, 1, 3, 4),)
    assert units([tuple(range(6))], 1, 3, 2) == ((0, 1, 2), (3, 4, 5))
    with pytest.raises(ValueError, match="4 devices in blocks of 2, 6 are needed"):
        units(nodes, 2, 1, 3)


def test_cp_groups_stay_inside_nodes_where_they_can() -> None:
    nodes = [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]
    assert units(nodes, 2, 1, 2, cp=2) == ((0, 1, 2, 3), (6, 7, 8, 9))
    assert units(nodes, 2, 1, 1, cp=6) == (tuple(range(12)),)


def test_with_experts_the_replicas_of_a_pp_rank_are_neighbours() -> None:
    nodes = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert place(Candidate(ACTOR, Layout(1, 2), 4, ep=4), nodes) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert place(Candidate(ACTOR, Layout(2, 2), 2, ep=2), nodes) == ((0, 1, 4, 5), (2, 3, 6, 7))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    parallel=st.booleans(),
    dp=st.sampled_from(["any", "powers"]),
)
def test_columns_say_of_a_candidate_what_its_place_says(sizes: list[int], parallel: bool, dp: str) -> None:
    """Which groups leave their node, and how full the emptiest node is, as counted on real devices."""
    sizes.sort(reverse=True)
    nodes = [(index, size) for index, size in enumerate(sizes)]
    devices = tuple(Device(100 * node + i, node, "cpu") for node, size in nodes for i in range(size))
    base = cluster(1)
    able = Capabilities(recompute=("none",), micro_batches=(1,), cp=(1, 2) if parallel else (1,), dp=dp)
    asked = Problem(grpo(SMALL), WORKLOAD, Cluster(devices, base.kinds, base.links), able)
    site = whole(asked.cluster, None)
    assert site.sizes == tuple(sizes)
    node_of = {device.id: device.node for device in devices}
    for model_stage in (GENERATION, ACTOR):
        grid = Grids(asked, site.sizes).of(model_stage)
        for row in range(0, len(grid.rows), 3):
            candidate = grid.candidate(row)
            used = place(candidate, site.nodes)
            nodes_used = np.array([node_of[device] for unit in used for device in unit])
            placed = Rows.placed(Assignment(candidate, used), SMALL.layers, nodes_used)
            assert grid.rows.groups(row) == placed.groups(0), candidate
            reach = {device // 100 for unit in used for device in unit}
            assert grid.slots[row] == (candidate.devices if len(sizes) == 1 else max(reach) + 1)
            columns = (
                "layers_first",
                "layers_middle",
                "layers_last",
                "kv_bytes",
                "micro_batch",
                "cp",
                "dp",
                "pp",
                "tp",
            )
            for name in columns:
                assert getattr(grid.rows, name)[row] == getattr(placed, name)[0], name


def test_devices_in_use_come_first() -> None:
    current = colocated(grpo(), dp=2)
    moved = cluster(5).without([0])
    assert whole(moved, None).devices == (1, 2, 3, 4)
    assert whole(cluster(4), current).devices == (0, 1, 2, 3)
    assert whole(moved, current).devices == (1, 2, 3, 4)
    ahead = whole(cluster(6, nodes=3), replace(current, assignments=tuple(
        replace(a, units=((4,), (5,))) for a in current.assignments
    )))  # fmt: skip
    assert ahead.nodes[0] == (4, 5)


def test_a_kind_and_a_size_of_node_make_a_part_of_the_pool() -> None:
    base = cluster(8, nodes=2)
    kinds = {"cpu": base.kinds["cpu"], "fast": replace(base.kinds["cpu"], name="fast", peak_flops={"fp32": 1e12})}
    devices = tuple(replace(d, kind="fast" if d.node == 1 else "cpu") for d in base.devices)
    site = whole(Cluster(devices, kinds, base.links), None)
    assert site.kinds == ("fast", "cpu")
    assert [part.devices for part in site.alike()] == [(4, 5, 6, 7), (0, 1, 2, 3)]
    assert not site.regular


def test_the_cuts_of_ppo() -> None:
    parts = {frozenset(map(frozenset, cut)) for cut in cuts(FIVE)}
    rest = frozenset(FIVE) - {GENERATION}
    inference, training = frozenset({REFERENCE, REWARD}), frozenset({ACTOR, CRITIC})
    assert frozenset({frozenset(FIVE)}) in parts
    assert frozenset({frozenset({GENERATION}), rest}) in parts
    assert frozenset({frozenset({GENERATION}) | inference, training}) in parts
    assert frozenset({frozenset({GENERATION}), inference, training}) in parts
    assert frozenset({frozenset({CRITIC}), frozenset(FIVE) - {CRITIC}}) in parts
    assert len(parts) == 1 + 15 + 1
    assert len(shapes(FIVE)) == len(set(shapes(FIVE))) == 40


def test_three_models_of_one_stage_form_groups_in_every_way() -> None:
    models = tuple(ModelStage(name, Stage.INFERENCE) for name in ("a", "b", "c"))
    a, b, c = models
    groups = {frozenset(map(frozenset, shape.partitions[0])) for shape in shapes(models) if len(shape.partitions) == 1}
    expected: list[list[tuple[ModelStage, ...]]] = [
        [(a, b, c)],
        [(a,), (b, c)],
        [(b,), (a, c)],
        [(c,), (a, b)],
        [(a,), (b,), (c,)],
    ]
    assert groups == {frozenset(map(frozenset, each)) for each in expected}


def test_sixteen_thousand_devices_lie_in_order() -> None:
    nodes = [tuple(range(8 * node, 8 * node + 8)) for node in range(2048)]
    found = np.array(units(nodes, 4, 8, 512))
    assert found.shape == (512, 32)
    assert (found.ravel() == np.arange(16384)).all()
