"""Collectives by bytes, ranks and link."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.clusters.named import machine, names
from nereus.core import Link
from nereus.cost import collectives
from nereus.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s, by_link, reduce_scatter_s, send_s

LINK = Link(1e9, 1e-5)
LINKS = [link for name in names() for link in machine(name).links.values()]


def of(ranks: int) -> np.ndarray:
    return np.array([ranks])


def test_a_ring_by_hand() -> None:
    size = np.array([8e6])
    # 2 * 3/4 of the bytes, and twice the depth of a tree of four.
    assert all_reduce_s(LINK, of(4), size) == pytest.approx(2 * 0.75 * 8e6 / 1e9 + 4e-5)
    assert all_gather_s(LINK, of(4), size) == pytest.approx(0.75 * 8e6 / 1e9 + 2e-5)
    assert all_to_all_s(LINK, of(4), size) == all_gather_s(LINK, of(4), size)
    assert send_s(LINK, size) == pytest.approx(8e-3 + 1e-5)


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    size = np.array([1e7])
    parts = reduce_scatter_s(LINK, of(8), size) + all_gather_s(LINK, of(8), size)
    assert all_reduce_s(LINK, of(8), size) == pytest.approx(parts)


def test_constants_are_used_as_named() -> None:
    constants = {
        "collective.start_s": 1e-4,
        "collective.fill_s": 1e-3,
        "collective.fill_bytes": 3e6,
        "collective.few_ranks": 1.0,
        "all_reduce.share": 0.5,
    }
    link = Link(1e9, 1e-5, constants)
    # Two ranks send 2 * 1/2 of 1 MB; of 1 GB/s half is reached, of that 1 / (1 + 1/2).
    expected = 1e-4 + 2e-5 + 1e6 / (0.5e9 / 1.5) + 1e-3 * 1e6 / 4e6
    assert all_reduce_s(link, of(2), np.array([1e6])) == pytest.approx(expected)


def test_a_group_across_nodes_uses_a_port_of_each_rank_in_a_node() -> None:
    size = np.array([1e8])
    # Two nodes of eight: each sends half and receives half, twice, over eight ports.
    together = all_reduce_s(LINK, of(16), size, local=8)
    assert together == pytest.approx(2 * 0.5 * 1e8 / 8e9 + 8e-5)
    # Groups with one rank in a node have one port each: no less time for the same shard, and eight times the bytes.
    assert all_reduce_s(LINK, of(2), size / 8) == pytest.approx(together - 6e-5)


@pytest.mark.parametrize("name", ["all_reduce_s", "all_gather_s", "reduce_scatter_s", "all_to_all_s"])
@given(
    index=st.integers(0, len(LINKS) - 1), ranks=st.integers(2, 64), size=st.floats(1.0, 1e10), more=st.floats(1.0, 8.0)
)
def test_more_bytes_never_take_less_time(name: str, index: int, ranks: int, size: float, more: float) -> None:
    price, link = getattr(collectives, name), LINKS[index]
    once = price(link, of(ranks), np.array([size]))
    assert once > 0
    assert price(link, of(ranks), np.array([more * size])) >= once
    assert price(link, of(1), np.array([size])) == 0


@given(ranks=st.integers(2, 512), size=st.floats(1.0, 1e10))
def test_more_ranks_never_take_less_time_on_a_plain_link(ranks: int, size: float) -> None:
    assert all_reduce_s(LINK, of(ranks + 1), np.array([size])) >= all_reduce_s(LINK, of(ranks), np.array([size]))


def test_rows_are_priced_on_their_own_link() -> None:
    class Both:
        intra, inter = Link(1e9, 0.0), Link(1e8, 0.0)

    size = np.array([1e6, 1e6])
    found = by_link(Both(), np.array([False, True]), lambda link: send_s(link, size))
    assert found == pytest.approx([1e-3, 1e-2])
    for spans in ([False, False], [True, True]):
        expected = [1e-2 if span else 1e-3 for span in spans]
        assert by_link(Both(), np.array(spans), lambda link: send_s(link, size)) == pytest.approx(expected)
