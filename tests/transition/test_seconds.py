"""Seconds of a primitive on a machine whose memory was measured: by hand, for tensors that TP cuts evenly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.core import EMU, Cluster, EMUSet, Layout, TransitionDAG
from nereus.transition import Loads, connect
from tests.support.models import ACTOR, even, full_bytes, units
from tests.support.small import CLUSTER

SCHEMA = even(rows=2048)
SIZE = full_bytes(SCHEMA)
PAIR, ALL, COPY, HASH = 4e9, 6e9, 2e9, 1e9


def measured(all_bytes_per_s: float) -> Cluster:
    """One node without latency."""
    moving = {"state.bytes_per_s": PAIR, "state.all_bytes_per_s": all_bytes_per_s, "send.share": 0.1}
    (kind,) = CLUSTER.kinds.values()
    kind = replace(kind, constants={"state.copy_bytes_per_s": COPY, "state.hash_bytes_per_s": HASH})
    devices = tuple(replace(device, node=0) for device in CLUSTER.devices)
    links = {"intra": replace(CLUSTER.links["intra"], latency_s=0.0, constants=moving), "inter": CLUSTER.links["inter"]}
    return Cluster(devices, {kind.name: kind}, links)


def seconds(start: tuple[EMU, ...], goal: tuple[EMU, ...], all_bytes_per_s: float = ALL) -> list[float]:
    """Of the acquiring primitives in order, but for those that have nothing to do."""
    dag: TransitionDAG = connect(EMUSet(start), EMUSet(goal), {ACTOR: SCHEMA})
    loads = Loads(dag, {ACTOR: SCHEMA}, measured(all_bytes_per_s))
    return [found.seconds for found in loads.of.values() if found.seconds]


def test_a_pair_alone_moves_at_its_own_rate_and_several_share_what_their_node_has() -> None:
    one = units(ACTOR, Layout(2), 0, 1)
    assert seconds(units(ACTOR, Layout(1), 0), units(ACTOR, Layout(1), 0, 1)) == [pytest.approx(SIZE / PAIR)]
    both = units(ACTOR, Layout(2), 0, 1, 2, 3)
    assert seconds(one, both) == [pytest.approx(SIZE / ALL)]
    assert seconds(one, both, all_bytes_per_s=2 * PAIR) == [pytest.approx(SIZE / 2 / PAIR)]


def test_what_a_device_keeps_in_another_cut_is_copied() -> None:
    """Each device of TP 2 keeps the half that it had of TP 1 or gets it; counted as if one did both."""
    found = seconds(units(ACTOR, Layout(1), 0), units(ACTOR, Layout(2), 0, 1))
    assert found == [pytest.approx(SIZE / 2 / PAIR + SIZE / 2 / COPY)]


def test_copies_that_are_merged_are_hashed_first() -> None:
    """Nothing moves: each of two whole copies gives one half."""
    found = seconds(units(ACTOR, Layout(1), 0, 1), units(ACTOR, Layout(2), 0, 1))
    assert found == [pytest.approx(SIZE / 2 / COPY + SIZE / HASH)]
