"""Weight synchronisation in two parts that add up: what the source takes to send and the target to receive (D5.12).

Each part depends on its own side's candidate alone, so that a search may price the sides apart. What a device holds
already in the same cut is counted as if it travelled; targets of one source pass their parts on to each other. For the
same reason a side that lies inside a node is priced over the link inside it, wherever the other side is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nereus.core import DTYPE_BYTES, Link, ModelSpec
from nereus.cost.collectives import by_link, constant
from nereus.cost.held import Held
from nereus.cost.parameters import TENSORS_PER_LAYER, parameters
from nereus.cost.ranks import Ranks
from nereus.cost.rows import Floats, Rows
from nereus.cost.site import Site


def send_s(spec: ModelSpec, rows: Rows, site: Site) -> Floats:
    """Ideal seconds until the devices of the source have sent every parameter once."""
    whole_bytes = float(parameters(spec).total) * DTYPE_BYTES[spec.dtype]
    return _over(site, rows, lambda link: whole_bytes / rows.devices / _rate(link))


def receive_s(spec: ModelSpec, rows: Rows, site: Site) -> Floats:
    """Ideal seconds until the fullest device of the target has its shard, tensor by tensor, and has stored it."""
    held = Held.of(spec, rows, Ranks.stacked(rows, spec.layers))
    elements = held.elements(np.zeros(len(rows), bool)).max(axis=0)
    shard_bytes = elements * DTYPE_BYTES[spec.dtype]
    messages = TENSORS_PER_LAYER * np.maximum(rows.layers_first, rows.layers_middle)
    travel_s = _over(site, rows, lambda link: shard_bytes / _rate(link) + messages * link.latency_s)
    return np.asarray(travel_s + shard_bytes / site.rates.bytes_per_s)


def _over(site: Site, rows: Rows, price: Callable[[Link], Floats]) -> Floats:
    return np.asarray(by_link(site, rows.tp_spans | rows.cp_spans | rows.pp_spans | rows.dp_spans, price))


def _rate(link: Link) -> float:
    """What messages between two devices reach of the link's bytes per second."""
    return link.bytes_per_s * constant(link, "send.share")
