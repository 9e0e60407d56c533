"""Candidates as columns: which groups leave their node, and which layers the pp ranks hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import Assignment, Candidate, Layout
from nereus.cost.rows import Rows
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
        (3, 1, 3, ("tp", "dp")),
        (1, 3, 4, ("pp", "dp")),
    ],
)
def test_groups_that_leave_nodes_of_eight(tp: int, pp: int, dp: int, leaves: tuple[str, ...]) -> None:
    rows = Rows.of([Candidate(ACTOR, Layout(tp, pp), dp)], 16, node_size=8)
    assert {name for name in ("tp", "pp", "dp") if getattr(rows, f"{name}_spans")[0]} == set(leaves)


@settings(max_examples=80, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]), dp=st.integers(1, 6), cp=st.sampled_from([1, 2])
)
def test_packed_devices_span_what_packing_says(tp: int, pp: int, dp: int, cp: int) -> None:
    candidate = Candidate(ACTOR, Layout(tp, pp), dp, cp=cp)
    rows = Rows.of([candidate], 16, node_size=8)
    placed = Rows.placed(packed(candidate), 16, np.arange(candidate.devices) // 8)
    assert rows.groups(0) == placed.groups(0)
    assert rows.devices[0] == placed.devices[0] == candidate.devices
    assert rows.size[0] == tp * pp * cp


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
