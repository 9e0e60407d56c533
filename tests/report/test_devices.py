"""Device sets in words: whole nodes as nodes, equal parts of nodes as parts, whatever is left one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import EMU, Assignment, Candidate, Cluster, Device, DeviceKind, Layout, Link, ModelStage, Stage
from nereus.core.plan import listed, ranges
from nereus.report.devices import units, where

LINK = Link(1e9, 1e-5)


def nodes(count: int, size: int) -> Cluster:
    kind = DeviceKind("k", 1, {"bf16": 1.0}, 1.0)
    devices = tuple(Device(index, index // size, "k") for index in range(count * size))
    return Cluster(devices, {"k": kind}, {"intra": LINK, "inter": LINK})


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (range(32), "nodes 0-3"),
        (range(8), "node 0"),
        ([0, 1, 8, 9, 16, 17], "devices 0-1 of nodes 0-2"),
        ([5], "device 5 of node 0"),
        ([*range(8), 8, 9], "node 0, devices 0-1 of node 1"),
    ],
)
def test_sets_in_a_pool_of_nodes(chosen: list[int], words: str) -> None:
    assert where(chosen, nodes(4, 8)) == words


def test_a_single_node_needs_no_name() -> None:
    assert where([0, 1, 2, 5], nodes(1, 8)) == "devices 0-2, 5"


def test_sixteen_thousand_devices_are_a_few_words() -> None:
    assert where(range(16_384), nodes(2048, 8)) == "nodes 0-2047"


def test_of_many_ranges_the_first_are_named_and_the_rest_counted() -> None:
    odd = [device for device in range(800) if device // 8 % 2]
    assert where(odd, nodes(100, 8), 3) == "nodes 1, 3, 5 and 47 more"
    assert where(range(16), nodes(100, 8), 3) == "nodes 0-1"
    assert where([0, 2, 3, 6], nodes(1, 8), 2) == "devices 0, 2-3 and 1 more"


def test_few_devices_are_listed_one_by_one() -> None:
    assert listed([2, 0, 1]) == "0,1,2"
    assert listed(range(100)) == "0-99"


@pytest.mark.parametrize(("order", "words"), [(range(16), "[0-15]"), ([*range(8, 16), *range(8)], "[8,9,")])
def test_a_large_unit_is_a_range_where_its_ranks_rise(order: Sequence[int], words: str) -> None:
    unit = EMU(ModelStage("actor", Stage.TRAINING), Layout(2, 8), tuple(order))
    placed = Assignment(Candidate(unit.model_stage, unit.layout, 1), (unit.devices,))
    assert units(placed, nodes(2, 8)).startswith(words)


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_just_what_is_in_the_set(numbers: set[int]) -> None:
    text = ranges(numbers)
    spans = [part.split("-") for part in text.split(", ") if part]
    assert {n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)} == numbers
