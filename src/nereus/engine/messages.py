"""Cuts what a rank sends and receives into messages, the same way on both sides of a pair, and puts them into rounds.

What a pair exchanges is cut into bundles; bundle n travels in round n. A rank starts rounds in order, as long as it has
staging memory, and ends them in order: the earliest round that is open anywhere can always end, so bounded buffers
cannot make ranks wait for one another for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

MOST_BYTES, LEAST_BYTES = 1 << 24, 1 << 12
IN_FLIGHT = 4
"""Rounds that a bucket has room for."""
ALONE_BYTES = 1 << 17
"""A part of this size is a message of its own."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements that travel: the view they are read from or written to, and the dtype in which they travel.

    Both sides of a pair have views of equal shapes, of any strides; a side that stores another dtype converts.
    `stored` is what the source stores, where both sides know that it is another dtype.
    """

    view: torch.Tensor
    dtype: torch.dtype
    stored: torch.dtype | None = None

    @property
    def bytes(self) -> int:
        """What travels: the elements and nothing else."""
        size: int = self.view.numel() * self.dtype.itemsize
        return size

    @property
    def plain(self) -> bool:
        """Whether the view's own memory is what travels."""
        view = self.view
        return view.is_contiguous() and view.dtype == self.dtype and not view.is_conj() and not view.is_neg()


Parts = Sequence[Part]


@dataclass(frozen=True, slots=True)
class Message:
    """Parts that travel together; those of wide elements first, so that each lies aligned to its elements."""

    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(part.bytes for part in self.parts)


Addressed = tuple[tuple[int, Message], ...]


@dataclass(frozen=True, slots=True)
class Round:
    """Messages to and from peers, as (rank, message), those of one peer in order."""

    sends: Addressed
    receives: Addressed


def bundle_bytes(bucket_bytes: int, most_peers: int) -> int:
    """Largest bundle: those of a few rounds, one to each of at most `most_peers`, fit into one bucket."""
    return max(LEAST_BYTES, min(MOST_BYTES, bucket_bytes // (IN_FLIGHT * max(1, most_peers))))


def rounds(sends: Mapping[int, Parts], receives: Mapping[int, Parts], limit: int) -> list[Round]:
    """What one rank sends and receives, by peer, in order; bundles of at most `limit` bytes."""
    pairs = zip_longest(_by_round(sends, limit), _by_round(receives, limit), fillvalue=())
    return [Round(out, inward) for out, inward in pairs]


def _by_round(by_peer: Mapping[int, Parts], limit: int) -> Iterator[Addressed]:
    peers = sorted(by_peer)
    for bundles in zip_longest(*(_bundles(by_peer[peer], limit) for peer in peers), fillvalue=()):
        yield tuple((peer, message) for peer, bundle in zip(peers, bundles, strict=True) for message in bundle)


def _bundles(parts: Parts, limit: int) -> Iterator[tuple[Message, ...]]:
    """What goes to one peer in each round: parts up to the limit, as messages."""
    cut = [small for part in parts if part.view.numel() for small in limited(part, limit)]
    chosen: list[Part] = []
    size = 0
    for part in sorted(cut, key=lambda part: -part.dtype.itemsize):
        if chosen and size + part.bytes > limit:
            yield _messages(chosen)
            chosen, size = [], 0
        chosen.append(part)
        size += part.bytes
    if chosen:
        yield _messages(chosen)


def _messages(parts: Parts) -> tuple[Message, ...]:
    """Large parts alone, so that contiguous ones need no copy; small ones together, so that they are few."""
    small = tuple(part for part in parts if part.bytes < ALONE_BYTES)
    alone = tuple(Message((part,)) for part in parts if part.bytes >= ALONE_BYTES)
    return (Message(small), *alone) if small else alone


def limited(part: Part, limit: int) -> Iterator[Part]:
    """Cut along the outermost dim into parts of at most `limit` bytes, of one element at least."""
    view = part.view
    if part.bytes <= limit or view.numel() == 1:
        yield part
        return
    dim = next(dim for dim, size in enumerate(view.shape) if size > 1)
    count = view.shape[dim]
    step = max(1, limit // (part.bytes // count))
    for start in range(0, count, step):
        yield from limited(replace(part, view=view.narrow(dim, start, min(step, count - start))), limit)
