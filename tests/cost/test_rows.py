"""Candidates as columns: which groups leave their node, and which layers the pp ranks hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nereus.clusters.named import machine
from nereus.core import Assignment, Candidate, Layout
from nereus.cost.rows import Ints, Rows, distinct
from tests.cost.jobs import ACTOR


def packed(candidate: Candidate) -> Assignment:
    size = candidate.layout.size * candidate.cp
    units = tuple(tuple(range(unit * size, (unit + 1) * size)) for unit in range(candidate.dp))
    return Assignment(candidate, units)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "leaves"),
    [
        (8, 1, 1, ()),
        (4, 2, 1, ()),
        (2, 1, 4, ()),
        (8, 2, 1, ("pp",)),
        (4, 2, 2, ("dp",)),
        (16, 1, 1, ("tp",)),
        (3, 1, 2, ()),
        (3, 1, 3, ("dp",)),  # two groups a node, two devices left over
        (1, 3, 4, ("pp", "dp")),
    ],
)
def test_groups_that_leave_nodes_of_eight(tp: int, pp: int, dp: int, leaves: tuple[str, ...]) -> None:
    rows = Rows.of([Candidate(ACTOR, Layout(tp, pp), dp)], 16, node_size=8)
    assert {name for name in ("tp", "pp", "dp") if getattr(rows, f"{name}_spans")[0]} == set(leaves)


def dealt(candidate: Candidate, node: int) -> Ints:
    """The node of every device, unit by unit, where nodes get whole tp x cp groups; with experts pp is outermost."""
    group, pp, dp = candidate.layout.tp * candidate.cp, candidate.layout.pp, candidate.dp
    turns = [pp_rank * dp + unit if candidate.ep > 1 else unit * pp + pp_rank
             for unit in range(dp) for pp_rank in range(pp)]  # fmt: skip
    return np.repeat(np.array(turns) // (node // group), group)


@pytest.mark.parametrize(("tp", "pp", "dp", "leaves"), [
    (1, 8, 8, {"pp"}),  # the eight replicas of a pp rank, and so its experts, fill a node
    (1, 4, 16, {"pp", "dp"}),
    (2, 4, 8, {"pp", "dp"}),
])  # fmt: skip
def test_with_experts_the_pipeline_leaves_its_node_first(tp: int, pp: int, dp: int, leaves: set[str]) -> None:
    candidate = Candidate(ACTOR, Layout(tp, pp), dp, ep=8)
    for rows in (Rows.of([candidate], 16, 8), Rows.placed(packed(candidate), 16, dealt(candidate, 8))):
        assert {name for name in ("tp", "pp", "dp", "ep", "cp") if getattr(rows, f"{name}_spans")[0]} == leaves


TPS, PPS, DPS = st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 3, 4]), st.integers(1, 12)


@settings(max_examples=150, deadline=None)
@given(tp=TPS, pp=PPS, dp=DPS, cp=st.sampled_from([1, 2]), node=st.sampled_from([16, 18, 24]), data=st.data())
def test_packed_devices_span_what_packing_says(
    tp: int, pp: int, dp: int, cp: int, node: int, data: st.DataObject
) -> None:
    ep = data.draw(st.sampled_from([ep for ep in (1, 2, 4, 6, 8, 12, 16) if tp * cp * dp % ep == 0]))
    candidate = Candidate(ACTOR, Layout(tp, pp), dp, cp=cp, ep=ep)
    rows = Rows.of([candidate], 16, node_size=node)
    placed = Rows.placed(packed(candidate), 16, dealt(candidate, node))
    assert rows.groups(0) == placed.groups(0)
    assert rows.devices[0] == placed.devices[0] == candidate.devices
    assert rows.size[0] == tp * pp * cp


@settings(max_examples=150, deadline=None)
@given(tp=TPS, pp=PPS, dp=DPS, node=st.sampled_from([8, 9, 12]), data=st.data())
def test_an_expert_group_leaves_its_node_when_its_devices_lie_in_two(
    tp: int, pp: int, dp: int, node: int, data: st.DataObject
) -> None:
    ep = data.draw(st.sampled_from([ep for ep in range(1, tp * dp + 1) if tp * dp % ep == 0]))
    candidate = Candidate(ACTOR, Layout(tp, pp), dp, ep=ep)
    groups = (np.arange(candidate.devices) // (node // tp * tp)).reshape(-1, ep)  # neighbours: pp is outermost
    expected = bool((groups != groups[:, :1]).any())
    if tp % ep == 0 or ep % tp == 0:  # else some group begins inside a tp group
        assert Rows.placed(packed(candidate), 16, dealt(candidate, node)).ep_spans[0] == expected


@pytest.mark.parametrize(("degree", "experts"), [(8, 1), (16, 1), (32, 1), (64, 1), (1, 8), (1, 64), (2, 32)])
def test_groups_of_a_rack_stay_inside_its_fast_link(degree: int, experts: int) -> None:
    node = len(machine("gb200").ids)
    rows = Rows.of([Candidate(ACTOR, Layout(degree), 256 // degree, ep=experts)], 16, node)
    assert not rows.tp_spans[0]
    assert not rows.ep_spans[0]
    assert rows.dp_spans[0]


def test_a_row_holds_the_layers_of_its_first_fullest_middle_and_last_rank() -> None:
    layouts = [Layout(1, 1), Layout(1, 2), Layout(1, 4), Layout(1, 3, (2, 6, 8))]
    rows = Rows.of([Candidate(ACTOR, layout, 1) for layout in layouts], 16, node_size=8)
    ends = zip(rows.layers_first.tolist(), rows.layers_middle.tolist(), rows.layers_last.tolist(), strict=True)
    assert list(ends) == [(16, 0, 16), (8, 0, 8), (4, 4, 4), (2, 6, 8)]


def test_some_of_the_rows() -> None:
    rows = Rows.of([Candidate(ACTOR, Layout(tp), 2, recompute="full") for tp in (1, 2, 4)], 16, node_size=8)
    assert rows[rows.tp > 1].tp.tolist() == [2, 4]
    assert len(rows[:1]) == 1
    assert rows.recompute.tolist() == [2, 2, 2]


@given(st.lists(st.lists(st.sampled_from([0, 1, (1 << 16) - 1]), min_size=5, max_size=5), min_size=1))
@example([[number, 0, 0, 0, (1 << 16) - 1] for number in (0, 1)] + [[0, *((1 << 16) - 1,) * 4]])
def test_equal_rows_are_told_from_others_however_large_their_numbers(rows: list[list[int]]) -> None:
    columns = list(np.array(rows, dtype=np.int64).T)
    few, where = distinct(columns)
    assert len(few) == len({tuple(row) for row in rows})
    assert [rows[few[index]] for index in where] == rows
