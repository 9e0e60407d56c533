"""Weight synchronisation in two parts that add up: what the source takes to send and the target to receive (D5.12).

Each part depends on its own side's candidate alone, so that a search may price the sides apart. What a device holds
already in the same cut is counted as if it travelled. Targets pass their parts on to each other: each element enters a
node once and then spreads inside it. A side that lies inside a node is priced over the link inside it, wherever the
other side is.

Hosts that gather the whole model on every device, tensor by tensor, are priced so where their constants say it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nereus.core import DTYPE_BYTES, Link, ModelSpec
from nereus.cost.collectives import all_gather_s, by_link
from nereus.cost.constants import of_link, state_bytes_per_s
from nereus.cost.held import Held
from nereus.cost.parameters import TENSORS_PER_LAYER, parameters
from nereus.cost.ranks import Ranks
from nereus.cost.rows import Bools, Floats, Ints, Rows, expert_devices
from nereus.cost.site import Site


def send_s(spec: ModelSpec, rows: Rows, site: Site) -> Floats:
    """Ideal seconds until the devices of the source have sent every parameter once."""
    whole_bytes = float(parameters(spec).total) * DTYPE_BYTES[spec.dtype]
    return _over(site, rows, lambda link: whole_bytes / rows.devices / state_bytes_per_s(link))


def receive_s(spec: ModelSpec, rows: Rows, site: Site) -> Floats:
    """Ideal seconds until the fullest device of the target has its shard, tensor by tensor, and has stored it."""
    held = Held.of(spec, rows, Ranks.stacked(rows, spec.layers))
    elements = held.elements(np.zeros(len(rows), bool)).max(axis=0)
    shard_bytes = elements * DTYPE_BYTES[spec.dtype]
    stored_s = shard_bytes / site.rates.bytes_per_s
    host_s = site.rates["sync.tensor_s"]
    if site.rates["sync.whole"]:
        return np.asarray(_gathered_s(spec, rows, site) + _tensors(spec) * host_s + stored_s)
    messages = TENSORS_PER_LAYER * np.maximum(rows.layers_first, rows.layers_middle)
    entering = np.where(_spans(rows), 1.0 / _copies(rows), 0.0)
    together = of_link(site.intra, "state.all_bytes_per_s") / np.minimum(rows.node, rows.devices)
    inside = np.minimum(state_bytes_per_s(site.intra), together)
    travel_s = sum(
        share * (shard_bytes / rate + messages * link.latency_s)
        for share, link, rate in (
            (entering, site.inter, state_bytes_per_s(site.inter)),
            (1.0 - entering, site.intra, inside),
        )
    )
    return np.asarray(travel_s + messages * host_s + stored_s)


def _gathered_s(spec: ModelSpec, rows: Rows, site: Site) -> Floats:
    """The whole model on every device, to which each brings its part."""
    whole_bytes = np.full(len(rows), float(parameters(spec).total) * DTYPE_BYTES[spec.dtype])
    # Between nodes every device of a node has a port of its own.
    ports = np.where(_spans(rows), np.minimum(rows.node, rows.devices), 1)
    return _over(site, rows, lambda link: all_gather_s(link, rows.devices, whole_bytes, ports))


def _tensors(spec: ModelSpec) -> int:
    """Tensors of a model; every expert has its own."""
    routed = (spec.layers - spec.dense_layers) * spec.experts * (2 + spec.gated)
    return TENSORS_PER_LAYER * spec.layers + routed


def _over(site: Site, rows: Rows, price: Callable[[Link], Floats]) -> Floats:
    return np.asarray(by_link(site, _spans(rows), price))


def _spans(rows: Rows) -> Bools:
    """Whether the devices of a row lie on several nodes."""
    return rows.tp_spans | rows.cp_spans | rows.pp_spans | rows.dp_spans


def _copies(rows: Rows) -> Ints:
    """How many devices of a node hold the same shard, on the node with fewest; each brings another part of it in."""
    unit = np.where(rows.ep > 1, expert_devices(rows.tp, rows.cp, rows.dp, rows.ep), rows.size)
    inside = np.where((rows.ep > 1) | rows.cp_spans, 1, rows.cp)
    return inside * np.clip(rows.node // unit, 1, rows.dp)
