"""A worker's part of a transition: prepare what a primitive acquires, move, commit, destroy (D6.2, D6.5).

State in the memory of another process of this host is read there, and that process takes no part; whoever sends or
receives messages is in the transition's group.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

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
from nereus.engine.positions import Position, shards
from nereus.engine.reading import MOST_PIECES
from nereus.engine.remote import Remote, tiny_pieces_of
from nereus.engine.side_stream import beside
from nereus.engine.transports.attach import Process
from nereus.engine.transports.torch import Torch
from nereus.transition.flows import Flow
from nereus.transition.routes import (
    alias_source,
    aliased,
    by_device,
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


PROTOCOL = 6
"""Changes whenever workers of two versions would cut the same moves into different messages."""


@dataclass(slots=True)
class _Running:
    """The transition under way. `timeout_s` bounds what one primitive waits for its peers."""

    dag: TransitionDAG
    schemas: Mapping[ModelStage, StateSchema]
    logical: Mapping[ModelStage, LogicalState]
    timeout_s: float
    flows: Mapping[str, tuple[Flow, ...]]
    """Acquiring primitive → what this device sends to whom and receives from whom."""
    pairs: Mapping[str, Mapping[tuple[int, int], int]]
    """Acquiring primitive → (source, target) → bytes, of all devices."""
    processes: Mapping[int, Process] = field(default_factory=dict)
    """Device → its process where this one may read its memory."""
    group: Group | None = None
    """Of those that exchange messages, where this device is one of them."""
    apart: frozenset[tuple[int, int]] = frozenset()
    """(source, target) of the messages."""

    def moves(self, primitive: Primitive, device: int) -> tuple[Move, ...]:
        """What this device receives, reads and sends as messages in a primitive."""
        found = self.flows[primitive.id]
        mine = [flow for flow in found if flow.target == device or (device, flow.target) in self.apart]
        return expand_flows(mine, self.schemas[primitive.model_stage])

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
            "transition.connect": self._connect,
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
        """Expand the routes, which must be the coordinator's.

        The reply says whose memory this device can read, and where in its own memory its positions lie.
        """
        fields, device = message.fields, self._worker.device
        dag, schemas = fields["dag"], {ms: self._known(ms, told) for ms, told in fields["schemas"].items()}
        if fingerprint(dag, schemas) != fields["routes"]:
            raise TransitionError(f"device {device} would take other routes than the coordinator: versions differ")
        flows = dict[str, tuple[Flow, ...]]()
        for ms, schema in schemas.items():
            flows |= flows_of(dag, ms, schema, device)
        pairs = pair_bytes(dag, schemas)
        running = self._running = _Running(dag, schemas, fields["logical"], fields["timeout_s"], flows, pairs)
        running.processes = self._near(running, fields["cards"])
        places: dict[str, NDArray[np.int64]] = {}
        units = [unit for unit in dag.start.on(device) if unit.model_stage in schemas]
        for unit in units:
            places |= self._placed(str(unit.model_stage), self._find(unit))
        shown = len(places) == len(units)
        return Message("transition.begin", {"reads": frozenset(running.processes), "shown": shown}, places)

    def _known(self, model_stage: ModelStage, told: StateSchema) -> StateSchema:
        """The object of the last transition where it says the same: routes are remembered by a schema's identity."""
        self._schemas[model_stage] = as_before(self._schemas.get(model_stage), told)
        return self._schemas[model_stage]

    def _near(self, running: _Running, cards: Mapping[int, bytes]) -> dict[int, Process]:
        """Whose memory this device can read of those it lacks something of; packing is faster for very many pieces."""
        device = self._worker.device
        pieces: Counter[tuple[str, int]] = Counter()
        for group in running.dag.groups.values():
            inward = {p.id: [f for f in running.flows.get(p.id, ()) if f.target == device] for p in group}
            if any(inward.values()):
                schema, unit_of = running.schemas[group[0].model_stage], by_device(source_units(group))
                for name, flows in inward.items():
                    for flow in flows:
                        pieces[name, flow.source] += tiny_pieces_of(schema, unit_of[flow.source], flow)
        many = {source for (_, source), count in pieces.items() if count > MOST_PIECES}
        asked = sorted({source for _, source in pieces} - many)
        processes = {source: self._worker.groups.find(cards[source]) for source in asked}
        return {source: process for source, process in processes.items() if process is not None}

    def _connect(self, message: Message) -> None:
        """Make the group of those that exchange messages, and use each pair for the first time.

        So nothing is allocated for a peer that is not there.
        """
        running, fields, device = self._context(), message.fields, self._worker.device
        group = self._worker.groups.make(fields["group"], fields["members"], running.timeout_s)
        running.group, running.apart = group, fields["apart"]
        targets = {group.members.index(target) for source, target in running.apart if source == device}
        sources = {group.members.index(source) for source, target in running.apart if target == device}
        _first_bytes(Torch(group, self._worker.timeout_s), targets, sources)

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
        primitive = next(p for p in running.dag.primitives if p.id == message.fields["primitive"])
        members = running.dag.groups[primitive.group]
        schema = running.schemas[primitive.model_stage]
        transport = None if running.group is None else Torch(running.group, running.timeout_s, read_memory=False)
        mover = Mover(device, schema.tensors, schema.dtypes, transport, self._worker.ledger)
        goals = goal_units(running.dag, members)
        for goal in goals:
            if device in goal.devices and self._worker.positions.pending(primitive.group, goal) is None:
                self._prepare(mover, primitive, goal, alias_source(members, device))
        unit_of = by_device(source_units(members))
        remotes = {
            source: Remote(schema, unit_of[source], source, running.processes[source], places)
            for source, places in ((int(name), places) for name, places in message.arrays.items())
        }
        try:
            traffic = mover.run(
                running.moves(primitive, device),
                lambda _: self._find(unit_of.get(device)),
                lambda _: self._target(primitive.group, goals),
                running.most_peers(primitive),
                remotes,
            )
        except TransportError as error:
            raise TransportError(f"device {device}, {primitive.id}: {error}") from None
        fields = {"received_bytes": traffic.received_bytes, "seconds": time.perf_counter() - started_s}
        places = self._placed("places", self._target(primitive.group, goals)) if message.fields["lends"] else {}
        return Message("transition.apply", fields, places)

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
        taken, places = 0, dict[str, NDArray[np.int64]]()
        for unit in message.fields["units"]:
            taken += self._worker.positions.offload(unit)
            places = self._placed("places", self._find(unit))
        return Message("transition.offload", {"host_bytes": taken}, places)

    def _placed(self, name: str, position: Position) -> dict[str, NDArray[np.int64]]:
        """Where a position lies, under a name; nothing where others could not find its parts."""
        schema = self._context().schemas[position.unit.model_stage]
        found = position.addresses(shards(schema, position.unit, self._worker.device), schema.dtypes)
        return {} if found is None else {name: found}

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
        if self._running is not None and self._running.group is not None:
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
