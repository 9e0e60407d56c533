"""Cuts the routes of a rank into messages, the same way on both sides of a pair, and puts them into rounds.

What a pair exchanges is cut into bundles; bundle n travels in round n. A rank starts rounds in order, as long as it has
staging memory, and ends them in order: the earliest round that is open anywhere can always end, so bounded buffers
cannot make ranks wait for one another for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from nereus.transition.boxes import BoxPlan
from nereus.transition.region import Region

MOST_BYTES, LEAST_BYTES = 1 << 24, 1 << 12
IN_FLIGHT = 4
"""Rounds that a bucket has room for."""
ALONE_BYTES = 1 << 17
"""A parcel of this size is a message of its own."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One box of one tensor."""

    name: str
    region: Region
    bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """Parcels that travel together; those of wide elements first, so that each lies aligned to its elements."""

    parcels: tuple[Parcel, ...]

    @property
    def bytes(self) -> int:
        """What travels: the elements and nothing else."""
        return sum(parcel.bytes for parcel in self.parcels)


@dataclass(frozen=True, slots=True)
class Round:
    """Messages to and from peers, as (rank, message), those of one peer in order."""

    sends: tuple[tuple[int, Message], ...]
    receives: tuple[tuple[int, Message], ...]


def bundle_bytes(bucket_bytes: int, most_peers: int) -> int:
    """Largest bundle: those of a few rounds, one to each peer, fit into one bucket."""
    return max(LEAST_BYTES, min(MOST_BYTES, bucket_bytes // (IN_FLIGHT * max(1, most_peers))))


def rounds(plan: BoxPlan, rank: int, limit: int) -> list[Round]:
    """What one rank sends and receives, in order."""
    out: dict[int, list[Parcel]] = {}
    inward: dict[int, list[Parcel]] = {}
    for route in plan.routes:
        if rank == route.source:
            out.setdefault(route.target, []).extend(_parcels(plan, route.names, route.region, limit))
        elif rank == route.target:
            inward.setdefault(route.source, []).extend(_parcels(plan, route.names, route.region, limit))
    pairs = zip_longest(_by_round(plan, out, limit), _by_round(plan, inward, limit), fillvalue=())
    return [Round(sends, receives) for sends, receives in pairs]


def _by_round(
    plan: BoxPlan, by_peer: Mapping[int, list[Parcel]], limit: int
) -> Iterator[tuple[tuple[int, Message], ...]]:
    peers = sorted(by_peer)
    for bundles in zip_longest(*(_bundles(plan, by_peer[peer], limit) for peer in peers), fillvalue=()):
        yield tuple((peer, message) for peer, bundle in zip(peers, bundles, strict=True) for message in bundle)


def _bundles(plan: BoxPlan, parcels: list[Parcel], limit: int) -> Iterator[tuple[Message, ...]]:
    """What goes to one peer in each round: parcels up to the limit, as messages."""
    wide_first = sorted(parcels, key=lambda parcel: -plan.tensors[parcel.name].item_bytes)
    chosen: list[Parcel] = []
    size = 0
    for parcel in wide_first:
        if chosen and size + parcel.bytes > limit:
            yield _messages(chosen)
            chosen, size = [], 0
        chosen.append(parcel)
        size += parcel.bytes
    if chosen:
        yield _messages(chosen)


def _messages(parcels: list[Parcel]) -> tuple[Message, ...]:
    """Large parcels alone, so that contiguous ones need no copy; small ones together, so that they are few."""
    small = tuple(parcel for parcel in parcels if parcel.bytes < ALONE_BYTES)
    alone = tuple(Message((parcel,)) for parcel in parcels if parcel.bytes >= ALONE_BYTES)
    return (Message(small), *alone) if small else alone


def _parcels(plan: BoxPlan, names: tuple[str, ...], region: Region, limit: int) -> Iterator[Parcel]:
    item_bytes = plan.tensors[names[0]].item_bytes
    cut = list(_limited(region, max(1, limit // item_bytes)))
    for name in names:
        for part in cut:
            yield Parcel(name, part, part.elements * item_bytes)


def _limited(region: Region, most: int) -> Iterator[Region]:
    """Cut a box along its outermost dim into parts of at most `most` elements."""
    if region.elements <= most:
        yield region
        return
    count = region.shape[region.row_dim]
    step = max(1, most // (region.elements // count))
    for start in range(0, count, step):
        yield from _limited(region.rows(start, min(start + step, count)), most)
