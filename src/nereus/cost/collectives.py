"""Seconds of one collective as a function of bytes, ranks and link; every function takes and gives numpy arrays.

`size_bytes` is the whole tensor: what an all-reduce reduces, an all-gather ends with, a reduce-scatter starts from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from nereus.core import Link
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


def all_reduce_s(link: Link, ranks: Ints, size_bytes: Floats) -> Floats:
    """A ring all-reduce, with the latency of a tree; 0 for one rank."""
    return np.where(
        ranks > 1,
        2 * (ranks - 1) / ranks * size_bytes / link.bytes_per_s + 2 * _depth(ranks) * link.latency_s,
        0.0,
    )


def all_gather_s(link: Link, ranks: Ints, size_bytes: Floats) -> Floats:
    """Half an all-reduce."""
    return all_reduce_s(link, ranks, size_bytes) / 2


def reduce_scatter_s(link: Link, ranks: Ints, size_bytes: Floats) -> Floats:
    """Half an all-reduce."""
    return all_reduce_s(link, ranks, size_bytes) / 2


def all_to_all_s(link: Link, ranks: Ints, size_bytes: Floats) -> Floats:
    """Each rank holds `size_bytes` and keeps its own part."""
    return np.where(
        ranks > 1, (ranks - 1) / ranks * size_bytes / link.bytes_per_s + _depth(ranks) * link.latency_s, 0.0
    )


def send_s(link: Link, size_bytes: Floats) -> Floats:
    """One point-to-point message."""
    return size_bytes / link.bytes_per_s + link.latency_s


def _depth(ranks: Ints) -> Floats:
    return np.ceil(np.log2(np.maximum(ranks, 2)))
