"""Carries out moves for one device: local copies, what it reads, and what it sends and receives (D6.6).

Both sides of a pair cut the same list of moves into the same messages, so nothing but bytes travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from nereus.core import Kind, Move, NereusError, TensorSpec, TransportError
from nereus.engine.exchange import Exchange
from nereus.engine.ledger import Ledger
from nereus.engine.messages import Part, bundle_bytes
from nereus.engine.positions import TORCH_DTYPES, Position
from nereus.engine.remote import Reading, Remote
from nereus.engine.transports.torch import Torch
from nereus.transition.buckets import SHARE, bucket_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that crossed the network on behalf of one device."""

    received_bytes: int = 0
    sent_bytes: int = 0


Find = Callable[[Move], Position]
NOBODY: Mapping[int, Remote] = {}


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one device copies, sends and receives; may be run again as long as the tensors stay where they are."""

    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(target, source)"""
    exchange: Exchange | None
    traffic: Traffic
    ledger: Ledger
    readings: tuple[Reading, ...] = ()
    scratch_bytes: int = 0
    """For what is not read into a tensor itself."""

    def run(self) -> Traffic:
        """Everything, once."""
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8)
        alone = partial(self._alone, scratch)
        if self.exchange is None:
            with self.ledger.hold("buckets", scratch):
                alone()
            return self.traffic
        self.exchange.open()
        try:
            with self.ledger.hold("buckets", scratch, *self.exchange.allocate()):
                self.exchange.run(alone, chain.from_iterable(self.copies))
        finally:
            self.exchange.release()  # where the ledger refuses them, nobody counts them either
        return self.traffic

    def _alone(self, scratch: torch.Tensor) -> None:
        """What needs nobody's help."""
        for target, source in self.copies:
            target.copy_(source)
        for each in self.readings:
            each.run(scratch)


class Mover:
    """Moves boxes between the positions of this device and those of others.

    `dtypes` are the dtypes that travel, by kind; a side that stores another one converts. `transport` None: there is
    nobody to talk to. `share` is the part of the state that a staging buffer takes.
    """

    def __init__(
        self,
        device: int,
        tensors: Sequence[TensorSpec],
        dtypes: Mapping[Kind, str],
        transport: Torch | None,
        ledger: Ledger,
        share: int = SHARE,
    ) -> None:
        self._device = device
        self._dtypes = dtypes
        self._transport = transport
        self._ledger = ledger
        self._bucket_bytes = bucket_bytes(tensors, dtypes, share)

    def run(
        self,
        moves: Sequence[Move],
        source: Find,
        target: Find,
        most_peers: int | None = None,
        remotes: Mapping[int, Remote] = NOBODY,
    ) -> Traffic:
        """Read, send and receive all that concerns this device, once, as `prepare`.

        What is sent or read must stay as it is until every device has run: nobody waits for those who read it.
        """
        return self.prepare(moves, source, target, most_peers, kept=True, remotes=remotes).run()

    def prepare(
        self,
        moves: Sequence[Move],
        source: Find,
        target: Find,
        most_peers: int | None = None,
        stored: Mapping[Kind, str] | None = None,
        kept: bool = False,
        remotes: Mapping[int, Remote] = NOBODY,
    ) -> Prepared:
        """All that concerns this device of `moves`; `source` and `target` find its positions for one.

        From the devices of `remotes` it reads, and they know; others send.

        `most_peers` is the most that any device sends to or receives from, equal on all devices; None: `moves` are
        those of every device. `stored` are the dtypes that the sources store, by kind, where those are others than
        travel. `kept`: what is sent stays as it is until every device has run.
        """
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        sends: dict[int, list[Part]] = {}
        receives: dict[int, list[Part]] = {}
        readings = {device: Reading(device, remote) for device, remote in remotes.items()}
        for move in moves:
            for peer in move.targets:
                if move.source == self._device == peer:
                    own.append((self._view(target(move), move), self._view(source(move), move)))
                elif move.source == self._device:
                    sends.setdefault(self._rank(peer), []).append(self._part(source(move), move, stored))
                elif peer == self._device and move.source in readings:
                    readings[move.source].add(move, self._part(target(move), move, stored))
                elif peer == self._device:
                    receives.setdefault(self._rank(move.source), []).append(self._part(target(move), move, stored))

        exchange = None
        if self._transport is not None and (sends or receives):
            peers = most_peers_of(moves) if most_peers is None else most_peers
            limit = bundle_bytes(self._bucket_bytes, peers)
            exchange = Exchange(self._transport, sends, receives, limit, self._bucket_bytes, _stop, kept)
        read = tuple(readings.values())
        traffic = Traffic(_total(receives) + sum(each.bytes for each in read), _total(sends))
        scratch_bytes = max((each.scratch_bytes(self._bucket_bytes) for each in read), default=0)
        return Prepared(tuple(own), exchange, traffic, self._ledger, read, scratch_bytes)

    def _rank(self, device: int) -> int:
        members = () if self._transport is None else self._transport.group.members
        if device not in members:
            raise TransportError(f"device {self._device} has no group with device {device}, its members: {members}")
        return members.index(device)

    def _part(self, position: Position, move: Move, stored: Mapping[Kind, str] | None) -> Part:
        other = None if stored is None else TORCH_DTYPES[stored[move.kind]]
        return Part(self._view(position, move), TORCH_DTYPES[self._dtypes[move.kind]], other)

    def _view(self, position: Position, move: Move) -> torch.Tensor:
        """The part of a stored tensor that a move names."""
        tensor, shard = position.tensors[move.tensor, move.kind], position.held[move.tensor]
        if not shard.start <= move.box.start < move.box.stop <= shard.stop:
            raise TransportError(
                f"device {self._device}: {move.tensor} {move.kind} [{move.box.start}, {move.box.stop}) is asked for, "
                f"{position.unit} holds [{shard.start}, {shard.stop})"
            )
        return shard.part(tensor, move.box)


def most_peers_of(moves: Iterable[Move]) -> int:
    """The most devices that one device sends to or receives from."""
    return most_peers((move.source, target) for move in moves for target in move.targets)


def most_peers(pairs: Iterable[tuple[int, int]]) -> int:
    """The most devices that one device sends to or receives from, of pairs (source, target)."""
    targets: dict[int, set[int]] = {}
    sources: dict[int, set[int]] = {}
    for source, target in pairs:
        if source != target:
            targets.setdefault(source, set()).add(target)
            sources.setdefault(target, set()).add(source)
    return max((len(peers) for peers in (*targets.values(), *sources.values())), default=0)


def _stop(error: NereusError) -> None:
    """The first error ends this device's part; its groups are dropped, which ends the waiting of the others."""
    raise error


def _total(by_peer: Mapping[int, Sequence[Part]]) -> int:
    return sum(part.bytes for parts in by_peer.values() for part in parts)
