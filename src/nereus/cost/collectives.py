"""Seconds of one collective as a function of bytes, ranks and link; every function takes and gives numpy arrays.

`size_bytes` is the whole tensor: what an all-reduce reduces, an all-gather ends with, a reduce-scatter starts from.
Three parts: a start and hops in the depth of a tree; bytes over the link at the share of its rate that the operation
reaches; and between small and large messages a change of protocol and the filling of its pipeline. Without constants
only hops and bytes count.

A group that spans nodes with `local` ranks in each has so many ports between nodes to itself, and what nodes exchange
is what so many groups of one rank a node would: inside a node it is summed, or spread, first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from nereus.core import Link
from nereus.cost.constants import of_link
from nereus.cost.rows import Bools, Floats, Ints


class Links(Protocol):
    """The link inside a node and the one between nodes."""

    @property
    def intra(self) -> Link:
        """Joins devices of one node."""
        ...

    @property
    def inter(self) -> Link:
        """Joins nodes."""
        ...


def by_link(links: Links, spans: Bools, price: Callable[[Link], Floats]) -> Floats:
    """`price` on the link between nodes for rows whose group leaves its node, on the one inside for the others."""
    if not spans.any():
        return price(links.intra)
    if spans.all():
        return price(links.inter)
    return np.where(spans, price(links.inter), price(links.intra))


def all_reduce_s(link: Link, ranks: Ints, size_bytes: Floats, local: Ints | int = 1) -> Floats:
    """A ring all-reduce, with the latency of a tree; 0 for one rank."""
    sent_bytes = 2 * _others(ranks, local) * size_bytes
    return _collective_s(link, "all_reduce.share", ranks, sent_bytes, 2 * _depth(ranks), local)


def all_gather_s(link: Link, ranks: Ints, size_bytes: Floats, local: Ints | int = 1) -> Floats:
    """Every rank ends with all of `size_bytes`, of which it had its part."""
    return _collective_s(link, "gather.share", ranks, _others(ranks, local) * size_bytes, _depth(ranks), local)


def reduce_scatter_s(link: Link, ranks: Ints, size_bytes: Floats, local: Ints | int = 1) -> Floats:
    """The way of an all-gather backwards."""
    return all_gather_s(link, ranks, size_bytes, local)


def all_to_all_s(link: Link, ranks: Ints, size_bytes: Floats, local: Ints | int = 1) -> Floats:
    """Each rank holds `size_bytes` and keeps its own part; every other part takes its own way."""
    return _collective_s(link, "gather.share", ranks, _others(ranks, local) * size_bytes, _depth(ranks), local)


def send_s(link: Link, size_bytes: Floats) -> Floats:
    """One point-to-point message."""
    return size_bytes / (link.bytes_per_s * of_link(link, "send.share")) + link.latency_s


def _collective_s(link: Link, share: str, ranks: Ints, sent_bytes: Floats, hops: Floats, local: Ints | int) -> Floats:
    few = 1.0 / (1.0 + of_link(link, "collective.few_ranks") / np.maximum(ranks, 2))
    rate = link.bytes_per_s * of_link(link, share) * few * local
    fill_s = of_link(link, "collective.fill_s") * sent_bytes / (sent_bytes + of_link(link, "collective.fill_bytes"))
    seconds = of_link(link, "collective.start_s") + hops * link.latency_s + sent_bytes / rate + fill_s
    return np.where(ranks > 1, seconds, 0.0)


def _others(ranks: Ints, local: Ints | int) -> Floats:
    """Share of a tensor that belongs to other ranks, or to other nodes."""
    return 1.0 - 1.0 / np.maximum(ranks / local, 1.0)


def _depth(ranks: Ints) -> Floats:
    return np.ceil(np.log2(np.maximum(ranks, 2)))
