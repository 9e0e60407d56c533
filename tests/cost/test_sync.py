"""Weight synchronisation: bytes over links, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.core import Calibration, Candidate, Layout, Link
from nereus.cost import sync
from nereus.cost.kernels import Rates
from nereus.cost.parameters import TENSORS_PER_LAYER, parameters
from nereus.cost.rows import Rows
from nereus.cost.site import Site
from nereus.families import llama
from tests.cost.jobs import ACTOR, GENERATION, TINY

BYTES = 4 * int(parameters(TINY).total)
FAST, SLOW = Link(1e9, 1e-3, {"send.share": 0.5}), Link(1e8, 2e-3)
SITE = Site(Rates(1e12, 1e10, 0.0), FAST, SLOW, Calibration())


def rows(tp: int, dp: int, node: int) -> Rows:
    return Rows.of([Candidate(GENERATION if tp > 1 else ACTOR, Layout(tp), dp)], TINY.layers, node)


def test_every_device_of_the_source_sends_an_equal_part() -> None:
    assert sync.send_s(TINY, rows(1, 4, node=4), SITE)[0] == pytest.approx(BYTES / 4 / (0.5 * 1e9))
    assert sync.send_s(TINY, rows(1, 4, node=2), SITE)[0] == pytest.approx(BYTES / 4 / 1e8)


def test_a_device_of_the_target_receives_its_shard_tensor_by_tensor_and_stores_it() -> None:
    shard = 4 * int(parameters(TINY, 2).total)
    messages = TENSORS_PER_LAYER * TINY.layers
    inside = shard / (0.5 * 1e9) + messages * 1e-3 + shard / 1e10
    assert sync.receive_s(TINY, rows(2, 1, node=2), SITE)[0] == pytest.approx(inside)
    across = shard / 1e8 + messages * 2e-3 + shard / 1e10
    assert sync.receive_s(TINY, rows(2, 2, node=2), SITE)[0] == pytest.approx(across)


def test_a_layer_has_as_many_tensors_as_its_family_says() -> None:
    tensors = llama.Llama().tensors(TINY)
    assert sum(tensor.layer == 0 for tensor in tensors) == TENSORS_PER_LAYER
    assert sum(tensor.layer is None for tensor in tensors) == 3


def test_a_host_may_gather_the_whole_model_on_every_device() -> None:
    """Two nodes of two: what one node lacks comes over two ports; every tensor costs the host its time."""
    whole = replace(SITE, rates=Rates(1e12, 1e10, 0.0, (("sync.tensor_s", 1e-4), ("sync.whole", 1.0))))
    shard = 4 * int(parameters(TINY, 2).total)
    tensors = 9 * TINY.layers
    expected = BYTES / 2 / 2 / 1e8 + 2 * 2e-3 + tensors * 1e-4 + shard / 1e10
    assert sync.receive_s(TINY, rows(2, 2, node=2), whole)[0] == pytest.approx(expected)
    alone = sync.receive_s(TINY, rows(2, 1, node=2), whole)[0]
    assert alone == pytest.approx(BYTES / 2 / 1e9 + 1e-3 + tensors * 1e-4 + shard / 1e10)


def test_inside_a_node_a_gather_has_one_port_whatever_the_link_between_nodes_is() -> None:
    rates = Rates(1e12, 1e10, 0.0, (("sync.whole", 1.0),))
    apart, same = (replace(SITE, rates=rates, inter=inter) for inter in (SLOW, FAST))
    assert sync.receive_s(TINY, rows(2, 1, node=2), same)[0] == sync.receive_s(TINY, rows(2, 1, node=2), apart)[0]
