"""A worker's part of a transition: prepare what a primitive acquires, move, commit, destroy (D6.2, D6.5)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nereus.core import EMU, LogicalState, ModelStage, Move, Primitive, StateSchema, TransitionDAG, TransitionError
from nereus.engine.connection import Message
from nereus.engine.groups import Group
from nereus.engine.mover import Mover, most_peers
from nereus.engine.positions import Position
from nereus.engine.transports.torch import Torch
from nereus.transition.flows import Flow
from nereus.transition.routes import (
    alias_source,
    aliased,
    expand_flows,
    flows_of,
    goal_units,
    local_copies,
    source_units,
)

if TYPE_CHECKING:
    from nereus.engine.worker import Handler, Worker


@dataclass(slots=True)
class _Running:
    """The transition under way."""

    dag: TransitionDAG
    schemas: Mapping[ModelStage, StateSchema]
    logical: Mapping[ModelStage, LogicalState]
    group: Group
    flows: dict[ModelStage, dict[str, tuple[Flow, ...]]] = field(default_factory=dict)

    def moves(self, primitive: Primitive, device: int) -> tuple[Move, ...]:
        """What `device` sends and receives in a primitive; the same on every rank."""
        return expand_flows(self._flows(primitive), self.schemas[primitive.model_stage], device=device)

    def most_peers(self, primitive: Primitive) -> int:
        """The most devices that one device exchanges with in a primitive."""
        return most_peers((flow.source, flow.target) for flow in self._flows(primitive))

    def _flows(self, primitive: Primitive) -> tuple[Flow, ...]:
        model_stage = primitive.model_stage
        if model_stage not in self.flows:
            self.flows[model_stage] = flows_of(self.dag, model_stage, self.schemas[model_stage])
        return self.flows[model_stage][primitive.id]


class Transition:
    """The `transition.*` commands of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._running: _Running | None = None

    def handlers(self) -> dict[str, Handler]:
        """Command name → function."""
        return {
            "transition.logical": self._logical,
            "transition.begin": self._begin,
            "transition.apply": self._apply,
            "transition.commit": self._commit,
            "transition.destroy": self._destroy,
            "transition.abort": self._abort,
            "transition.end": self._end,
        }

    def _logical(self, _: Message) -> Message:
        """The counters of every live position."""
        positions = self._worker.positions
        return Message("transition.logical", {"logical": {p.unit.model_stage: p.logical for p in positions}})

    def _begin(self, message: Message) -> None:
        fields = message.fields
        group = self._worker.groups.make(fields["group"], fields["members"])
        self._running = _Running(fields["dag"], fields["schemas"], fields["logical"], group)

    def _apply(self, message: Message) -> Message:
        """One primitive: allocate the goal position at the first primitive that concerns it, then move."""
        started_s = time.perf_counter()
        running, device = self._context(), self._worker.device
        primitive = next(p for p in running.dag.primitives if p.id == message.fields["primitive"])
        members = running.dag.groups[primitive.group]
        schema = running.schemas[primitive.model_stage]
        transport = Torch(running.group, self._worker.timeout_s)
        mover = Mover(device, schema.tensors, schema.dtypes, transport, self._worker.ledger)
        for goal in goal_units(running.dag, members):
            if device in goal.devices and self._worker.positions.pending(primitive.group, goal) is None:
                self._prepare(mover, primitive, goal, alias_source(running.dag, members, device))
        sources = source_units(running.dag, members)
        goals = goal_units(running.dag, members)
        traffic = mover.run(
            running.moves(primitive, device),
            lambda _: self._find(next((unit for unit in sources if device in unit.devices), None)),
            lambda _: self._target(primitive.group, goals),
            running.most_peers(primitive),
        )
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
        shared = frozenset[str]() if old is None else aliased(schema, old, goal, device)
        position = self._worker.positions.prepare(primitive.group, goal, schema, base, shared)
        position.logical = running.logical[goal.model_stage]
        if old is not None and base is not None:
            mover.run(local_copies(schema, old, goal, device), lambda _: base, lambda _: position)

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

    def _abort(self, _: Message) -> None:
        """Keep what is committed and what was there before; let go of the rest, and of every group."""
        self._worker.positions.abort()
        self._worker.groups.drop_all()
        self._running = None

    def _end(self, _: Message) -> None:
        if self._running is not None:
            self._worker.groups.drop(self._running.group.name)
            self._running = None

    def _context(self) -> _Running:
        if self._running is None:
            raise TransitionError(f"device {self._worker.device}: no transition has begun")
        return self._running
