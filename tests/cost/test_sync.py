"""Weight synchronisation: bytes over links, counted by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest

from nereus.core import EMU, Calibration, Candidate, EMUSet, Kind, Layout, Link, StateSchema
from nereus.cost import sync
from nereus.cost.kernels import Rates
from nereus.cost.parameters import TENSORS_PER_LAYER, parameters
from nereus.cost.rows import Rows
from nereus.cost.site import Site
from nereus.families import llama
from nereus.transition.fit import stored_bytes
from nereus.transition.flows import Job
from nereus.transition.relays import relayed
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
    spread = (across + inside) / 2
    assert sync.receive_s(TINY, rows(2, 4, node=4), SITE)[0] == pytest.approx(spread), "two copies a node"


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "node", "copies"),
    [(1, 1, 8, 4, 4), (2, 1, 8, 8, 4), (2, 2, 4, 8, 2), (4, 1, 2, 4, 1), (2, 2, 4, 2, 1), (4, 1, 3, 8, 1)],
)
def test_what_enters_a_node_is_what_the_routes_bring_there(tp: int, pp: int, dp: int, node: int, copies: int) -> None:
    """The routes are those that a synchronisation takes, from a source of one device on a node of its own.

    Predicted is a little more: a replicated key head that two tp ranks of a node hold enters it once as well.
    """
    layout, first = Layout(tp, pp), 100
    spread = range(first, first + tp * pp * dp)
    node_of = {device: (device - first) // node for device in spread} | {0: -1}
    size = layout.size
    targets = tuple(EMU(GENERATION, layout, tuple(spread[i : i + size])) for i in range(0, len(spread), size))
    schema = StateSchema(TINY.layers, tuple(llama.Llama().tensors(TINY)), {Kind.PARAM: "fp32"})
    entering, inside = Counter[int](), Counter[int]()
    for flow in chain.from_iterable(relayed(schema, Job((EMU(ACTOR, Layout(), (0,)),), targets), node_of)):
        elements = len(flow.tensors) * (flow.stop - flow.start) * flow.row_elements
        (inside if node_of[flow.source] == node_of[flow.target] else entering)[flow.target] += 4 * elements
    fast, slow = (Link(rate, 0.0) for rate in (1e15, 1e6))
    row = Rows.of([Candidate(GENERATION, layout, dp)], TINY.layers, node)
    for counted, links in ((entering, (fast, slow)), (inside, (slow, fast))):
        predicted = 1e6 * sync.receive_s(TINY, row, Site(Rates(1e12, 1e20, 0.0), *links, Calibration()))[0]
        if counted is entering or copies > 1:
            assert predicted == pytest.approx(max(counted.values()), rel=0.1)
    held = stored_bytes(EMUSet(targets), {GENERATION: schema})
    assert max(entering.values()) == pytest.approx(max(held.values()) / copies, rel=0.1)


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
