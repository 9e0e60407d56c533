"""A worker's part of a transition: prepare what a primitive acquires, move, commit, destroy (D6.2, D6.5)."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nereus.core import (
    EMU,
    LogicalState,
    ModelStage,
    Move,
    Primitive,
    StateSchema,
    TransitionDAG,
    TransitionError,
    TransportError,
)
from nereus.engine.connection import Message
from nereus.engine.digest import hashes
from nereus.engine.groups import Group
from nereus.engine.mover import Mover, most_peers
from nereus.engine.positions import Position
from nereus.engine.side_stream import beside
from nereus.engine.transports.attach import together
from nereus.engine.transports.torch import Torch
from nereus.transition.flows import Flow
from nereus.transition.routes import (
    alias_source,
    aliased,
    expand_flows,
    fingerprint,
    flows_of,
    goal_units,
    local_copies,
    pair_bytes,
    source_units,
)

if TYPE_CHECKING:
    from nereus.engine.worker import Handler, Worker

log = logging.getLogger(__name__)


PROTOCOL = 5
"""Changes whenever workers of two versions would cut the same moves into different messages."""


@dataclass(slots=True)
class _Running:
    """The transition under way. `timeout_s` bounds what one primitive waits for its peers."""

    dag: TransitionDAG
    schemas: Mapping[ModelStage, StateSchema]
    logical: Mapping[ModelStage, LogicalState]
    group: Group
    timeout_s: float
    flows: Mapping[str, tuple[Flow, ...]]
    """Acquiring primitive → what this device sends to whom and receives from whom."""
    pairs: Mapping[str, Mapping[tuple[int, int], int]]
    """Acquiring primitive → (source, target) → bytes, of all devices."""

    def moves(self, primitive: Primitive) -> tuple[Move, ...]:
        """What this device sends and receives in a primitive."""
        return expand_flows(self.flows[primitive.id], self.schemas[primitive.model_stage])

    def hear(self, readers: Collection[int]) -> None:
        """Which devices read the memory of this one: of all that it sends to, so that nobody asks them."""
        members, mine = self.group.members, self.group.members[self.group.rank]
        targets = {target for pairs in self.pairs.values() for source, target in pairs if source == mine != target}
        self.group.neighbours.readers = {members.index(target): target in readers for target in targets}

    def most_peers(self, primitive: Primitive) -> int:
        """The most devices that one device exchanges with in a primitive."""
        return most_peers(self.pairs[primitive.id])


def environment() -> str:
    """What must be equal on all workers, or they would not understand each other's bytes."""
    return f"protocol {PROTOCOL}, torch {torch.__version__}, {sys.byteorder}-endian"


class Transition:
    """The `transition.*` commands of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._running: _Running | None = None
        self._schemas: dict[ModelStage, StateSchema] = {}

    def handlers(self) -> dict[str, Handler]:
        """Command name → function."""
        return {
            "transition.look": self._look,
            "transition.begin": self._begin,
            "transition.hash": self._hash,
            "transition.apply": self._apply,
            "transition.offload": self._offload,
            "transition.commit": self._commit,
            "transition.destroy": self._destroy,
            "transition.abort": self._abort,
            "transition.end": self._end,
        }

    def _look(self, _: Message) -> Message:
        """The counters of every live position, memory, what the environment is, and how to read this process."""
        logical = {position.unit.model_stage: position.logical for position in self._worker.positions}
        fields = {"logical": logical, "environment": environment(), "card": self._worker.groups.card}
        fields |= self._worker.memory()
        return Message("transition.look", fields)

    def _begin(self, message: Message) -> Message:
        """Make the group of all members, expand the routes, which must be the coordinator's, and try every pair."""
        fields, device = message.fields, self._worker.device
        group = self._worker.groups.make(fields["group"], fields["members"], fields["timeout_s"])
        group.neighbours.cards = fields["cards"]
        dag, schemas = fields["dag"], {ms: self._known(ms, told) for ms, told in fields["schemas"].items()}
        if fingerprint(dag, schemas) != fields["routes"]:
            raise TransitionError(f"device {device} would take other routes than the coordinator: versions differ")
        flows = dict[str, tuple[Flow, ...]]()
        for ms, schema in schemas.items():
            flows |= flows_of(dag, ms, schema, device)
        pairs = pair_bytes(dag, schemas)
        self._running = _Running(dag, schemas, fields["logical"], group, fields["timeout_s"], flows, pairs)
        return Message("transition.begin", {"reads": self._probe(self._running)})

    def _known(self, model_stage: ModelStage, told: StateSchema) -> StateSchema:
        """The object of the last transition where it says the same: routes are remembered by a schema's identity."""
        self._schemas[model_stage] = as_before(self._schemas.get(model_stage), told)
        return self._schemas[model_stage]

    def _probe(self, running: _Running) -> frozenset[int]:
        """Use each pair for the first time, so that nothing is allocated for a peer that is not there.

        Gives the devices whose memory this one reads; to and from those that are not on its host goes a byte.
        """
        group, mine = running.group, running.group.rank
        found = {pair for pairs in running.pairs.values() for pair in pairs}
        ranks = {member: rank for rank, member in enumerate(group.members)}
        pairs = {(ranks[source], ranks[target]) for source, target in found if source != target}
        cards = None if group.on_cuda else group.neighbours.cards
        apart = {(a, b) for a, b in pairs if cards is None or not together(cards[a], cards[b])}
        near = {a for a, b in pairs - apart if b == mine}
        read = group.neighbours.try_cards(near)
        targets, sources = {b for a, b in apart if a == mine}, {a for a, b in apart if b == mine}
        group.neighbours.sources |= dict.fromkeys(sources)
        _first_bytes(Torch(group, self._worker.timeout_s), targets, sources)
        return frozenset(group.members[rank] for rank in read)

    def _hash(self, message: Message) -> Message:
        """Hashes of the positions of some units, in the pieces that `marks` makes of their tensors."""
        found = {}
        for unit, marks in message.fields["units"].items():
            if self._worker.device in unit.devices:
                position = self._find(unit)
                found[str(unit.model_stage)] = hashes(position, self._worker.device, marks, message.fields["thorough"])
        return Message("transition.hash", {}, found)

    def _apply(self, message: Message) -> Message:
        """One primitive: allocate the goal position at the first primitive that concerns it, then move."""
        started_s = time.perf_counter()
        running, device = self._context(), self._worker.device
        running.hear(message.fields["readers"])
        primitive = next(p for p in running.dag.primitives if p.id == message.fields["primitive"])
        members = running.dag.groups[primitive.group]
        schema = running.schemas[primitive.model_stage]
        transport = Torch(running.group, running.timeout_s)
        mover = Mover(device, schema.tensors, schema.dtypes, transport, self._worker.ledger)
        goals = goal_units(running.dag, members)
        for goal in goals:
            if device in goal.devices and self._worker.positions.pending(primitive.group, goal) is None:
                self._prepare(mover, primitive, goal, alias_source(members, device))
        sources = source_units(members)
        try:
            traffic = mover.run(
                running.moves(primitive),
                lambda _: self._find(next((unit for unit in sources if device in unit.devices), None)),
                lambda _: self._target(primitive.group, goals),
                running.most_peers(primitive),
            )
        except TransportError as error:
            raise TransportError(f"device {device}, {primitive.id}: {error}") from None
        return Message(
            "transition.apply",
            {
                "received_bytes": traffic.received_bytes,
                "sent_bytes": traffic.sent_bytes,
                "seconds": time.perf_counter() - started_s,
            },
        )

    def _prepare(self, mover: Mover, primitive: Primitive, goal: EMU, old: EMU | None) -> None:
        running, device = self._context(), self._worker.device
        schema = running.schemas[goal.model_stage]
        base = None if old is None else self._find(old)
        staged = base is not None and base.staged
        shared = frozenset[str]() if old is None or staged else aliased(schema, old, goal, device)
        position = self._worker.positions.prepare(primitive.group, goal, schema, base, shared)
        position.logical = running.logical[goal.model_stage]
        if old is not None and base is not None:
            copies = local_copies(schema, old, goal, device, staged)
            mover.run(copies, lambda _: base, lambda _: position)

    def _offload(self, message: Message) -> Message:
        """Move positions to host memory; they are read from there until their Destroy."""
        taken = sum(self._worker.positions.offload(unit) for unit in message.fields["units"])
        return Message("transition.offload", {"host_bytes": taken})

    def _find(self, unit: EMU | None) -> Position:
        position = None if unit is None else self._worker.positions.find(unit)
        if position is None:
            raise TransitionError(f"device {self._worker.device} holds no position of {unit}")
        return position

    def _target(self, group: str, goals: tuple[EMU, ...]) -> Position:
        device = self._worker.device
        found = (self._worker.positions.pending(group, goal) for goal in goals if device in goal.devices)
        position = next((position for position in found if position is not None), None)
        if position is None:
            raise TransitionError(f"device {device} has prepared nothing for commit group {group}")
        return position

    def _commit(self, message: Message) -> None:
        self._worker.positions.commit(message.fields["group"])

    def _destroy(self, message: Message) -> None:
        for unit in message.fields["units"]:
            self._worker.positions.destroy(unit)

    def _abort(self, message: Message) -> Message:
        """Keep what is committed and what was there before; let go of the rest, and of every group.

        What lies in host memory comes back; the reply names the units for which there is no room.
        """
        if self._running is not None:
            log.info("device %d: transition stopped: %s", self._worker.device, message.fields.get("error"))
        self._worker.positions.abort()
        self._worker.groups.drop_all()
        self._running = None
        return Message("transition.abort", {"staged": self._worker.positions.restore()})

    def _end(self, _: Message) -> None:
        if self._running is not None:
            self._worker.groups.drop(self._running.group.name)
            self._running = None

    def _context(self) -> _Running:
        if self._running is None:
            raise TransitionError(f"device {self._worker.device}: no transition has begun")
        return self._running


def as_before(before: StateSchema | None, told: StateSchema) -> StateSchema:
    """`before` where `told` says the same. The order of kinds counts too: what travels is cut in that order."""
    if before is None or before != told or tuple(before.dtypes) != tuple(told.dtypes):
        return told
    return before


def _first_bytes(transport: Torch, targets: Collection[int], sources: Collection[int]) -> None:
    """A byte to each target, and from each source; on CUDA too they have come when this returns.

    NCCL makes a communicator with all members; later batches need only some.
    """
    with beside(transport.device, (), lambda: transport.left_s):
        if transport.group.on_cuda:
            transport.group.all_reduce(torch.zeros(1, device=transport.device))
        out, inward = (
            [(rank, torch.zeros(1, dtype=torch.uint8, device=transport.device)) for rank in sorted(ranks)]
            for ranks in (targets, sources)
        )
        handles, errors = transport.post(out, inward)
        for error in errors:
            raise TransportError(f"probe: {error}")
        for handle in handles:
            transport.wait(handle, "probe")
