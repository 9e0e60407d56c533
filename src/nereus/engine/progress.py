"""How far a transition has come, as the coordinator knows it; and which units are left when it stops (D6.5)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nereus.core import (
    EMU,
    Destroy,
    EdgeKind,
    EMUSet,
    Layout,
    ModelStage,
    NereusError,
    Offload,
    Outcome,
    Primitive,
    TransitionDAG,
    TransitionError,
)
from nereus.engine.connection import Message
from nereus.engine.crew import Reply
from nereus.transition.routes import by_device, goal_units, source_units

Traffic = Mapping[tuple[int, int], int]
"""(source, target) → bytes."""


@dataclass(slots=True)
class Progress:
    """How far a transition has come."""

    dag: TransitionDAG
    units: list[EMU]
    traffic: Mapping[str, Traffic]
    timeout_s: float = 0.0
    """How long one primitive may wait for its peers."""
    allowed_s: float = 0.0
    """How long the one of what is under way that ends last may take."""
    due_s: float = 0.0
    """When that is over, on the monotonic clock."""
    done: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    waiting: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Ticket under way → primitive and device."""
    telling: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Ticket of a commit or an end under way → which, and device."""
    ended: bool = False
    """Whether all have been told that they need their group no more."""
    received_bytes: Counter[int] = field(default_factory=Counter)
    sent_bytes: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    apart: frozenset[tuple[int, int]] = frozenset()
    """(source, target) that exchange messages: the target does not read the memory of the source."""
    places: dict[tuple[int, EMU], NDArray[np.int64]] = field(default_factory=dict)
    """(device, unit) → where its position lies in the memory of its process."""
    _needs: dict[str, tuple[set[str], set[str], set[str]]] | None = None
    _steps: dict[str, Primitive] = field(default_factory=dict)
    _lent: frozenset[EMU] | None = None

    def allow(self, seconds: float) -> None:
        """What begins now may take so long."""
        due_s = time.monotonic() + seconds
        if due_s > self.due_s:
            self.allowed_s, self.due_s = seconds, due_s

    @property
    def passed_s(self) -> float:
        """Of `allowed_s`."""
        return self.allowed_s - (self.due_s - time.monotonic())

    def devices(self, primitive: Primitive) -> frozenset[int]:
        """Its own devices, and those that send to them without keeping anything of what it makes."""
        return primitive.devices.union(*self.traffic.get(primitive.id, {}))

    def acting(self, primitive: Primitive) -> list[int]:
        """Those of its devices that have something to do: a source whose memory is read has not."""
        if isinstance(primitive, Destroy | Offload):
            return sorted(self.devices(primitive))
        pairs = self.traffic[primitive.id]
        goals = goal_units(self.dag, self.dag.groups[primitive.group])
        acting = {device for goal in goals for device in goal.devices}.union(*self.apart.intersection(pairs))
        return sorted(self.devices(primitive) & acting)

    def lenders(self, primitive: Primitive) -> frozenset[int]:
        """Devices whose positions of its goals other primitives read later."""
        if self._lent is None:
            self._lent = frozenset(unit for group in self.dag.groups.values() for unit in source_units(group))
        goals = goal_units(self.dag, self.dag.groups[primitive.group])
        return frozenset(device for goal in goals if goal in self._lent for device in goal.devices)

    def read(self, primitive: Primitive) -> dict[int, dict[str, NDArray[np.int64]]]:
        """Device → where what it reads lies: for each source, the places of its position."""
        pairs = [pair for pair in self.traffic.get(primitive.id, ()) if pair not in self.apart and pair[0] != pair[1]]
        unit_of = by_device(source_units(self.dag.groups[primitive.group])) if pairs else {}
        found: dict[int, dict[str, NDArray[np.int64]]] = {}
        for source, target in pairs:
            found.setdefault(target, {})[str(source)] = self.places[source, unit_of[source]]
        return found

    def startable(self) -> list[Primitive]:
        """In listed order; one that cannot start yet keeps its devices from those after it.

        Those of one commit group are told ahead: none reads what another makes, and each worker keeps their order.
        """
        told = {name for name, _ in self.waiting.values()}
        taken: dict[int, str | None] = {}
        """Device → the group of all that it has been told; None where one that waits is among them."""
        found: list[Primitive] = []
        for primitive in self.dag.primitives:
            if primitive.id in self.done:
                continue
            devices, group = self.devices(primitive), primitive.group
            free = all(taken.get(device, group) == group for device in devices)
            if primitive.id not in told and free and self._may_start(primitive, told):
                found.append(primitive)
                told.add(primitive.id)
            taken |= dict.fromkeys(devices, group if free and primitive.id in told else None)
        return found

    @property
    def moved(self) -> bool:
        """Whether no device needs its peers any more: only Destroys are left."""
        return all(step.id in self.done or isinstance(step, Destroy) for step in self.dag.primitives)

    @property
    def complete(self) -> bool:
        """Whether everything is done and everybody has said so."""
        return len(self.done) == len(self.dag.primitives) and not (self.waiting or self.telling or self.committable())

    def _may_start(self, primitive: Primitive, told: Collection[str]) -> bool:
        """Whether what it waits for is done, or told if of its own group; state of others must have been committed.

        A worker commits before it does what it is told next, so only a Destroy waits until all have said that they did:
        one that dies before it has must not take the last copy with it.
        """
        if self.telling and isinstance(primitive, Destroy):
            return False
        if self._needs is None:
            self._needs = self._found_needs()
        steps, own, groups = self._needs[primitive.id]
        return steps <= self.done and own <= self.done.union(told) and groups <= self.committed

    def _found_needs(self) -> dict[str, tuple[set[str], set[str], set[str]]]:
        """Primitive → what comes before it: primitives of other groups, of its own, and groups that it reads from."""
        groups = {step.id: name for name, steps in self.dag.groups.items() for step in steps}
        found: dict[str, tuple[set[str], set[str], set[str]]]
        found = {step.id: (set(), set(), set()) for step in self.dag.primitives}
        for edge in self.dag.edges:
            steps, own, committed = found[edge.later]
            group = groups.get(edge.earlier)
            if group is not None and group == groups.get(edge.later):
                own.add(edge.earlier)
                continue
            steps.add(edge.earlier)
            if group is not None and edge.kind is EdgeKind.STATE:
                committed.add(group)
        return found

    def take(self, ticket: int, reply: Reply) -> NereusError | None:
        """Enter one reply. A primitive is done when all its devices have received what the plan says; else an error."""
        if self.telling.pop(ticket, None) is not None:
            return reply if isinstance(reply, NereusError) else None
        if ticket not in self.waiting:
            return None
        name, device = self.waiting.pop(ticket)
        if isinstance(reply, NereusError):
            return reply
        self._place(name, device, reply)
        if reply.name == "transition.apply":
            received = reply.fields["received_bytes"]
            planned = sum(size for (_, target), size in self.traffic[name].items() if target == device)
            if received != planned:
                return TransitionError(
                    f"{name}: device {device} received {received:,} bytes, the plan says {planned:,}"
                )
            self.received_bytes[device] += received
        if name not in {other for other, _ in self.waiting.values()}:
            self.done.add(name)
            self.seconds[name] = time.perf_counter() - self.seconds[name]
            for (source, _), size in self.traffic.get(name, {}).items():
                self.sent_bytes[source] += size
        return None

    def _place(self, name: str, device: int, reply: Message) -> None:
        """Remember where the position lies that a primitive has made or moved."""
        if "places" in reply.arrays:
            if not self._steps:
                self._steps = {step.id: step for step in self.dag.primitives}
            primitive = self._steps[name]
            offloads = isinstance(primitive, Offload)
            units = primitive.sources if offloads else goal_units(self.dag, self.dag.groups[primitive.group])
            self.places |= {(device, unit): reply.arrays["places"] for unit in units if device in unit.devices}

    def committable(self) -> list[str]:
        """Commit groups whose primitives have all succeeded on every member."""
        return [
            name
            for name, primitives in self.dag.groups.items()
            if name not in self.committed and {primitive.id for primitive in primitives} <= self.done
        ]

    def outcome(self, units: EMUSet, started_s: float, error: str | None) -> Outcome:
        """What the controller is told of it."""
        return Outcome(
            units,
            error is None,
            time.perf_counter() - started_s,
            dict(self.received_bytes),
            dict(self.sent_bytes),
            {name: seconds for name, seconds in self.seconds.items() if name in self.done},
            error,
        )


def whole(units: Iterable[EMU], committed: Collection[EMU], alive: Collection[int]) -> tuple[EMU, ...]:
    """Units whose devices all live. Where an old and a committed unit share a device, the committed one stays."""
    ordered = sorted(units, key=lambda unit: unit not in committed)
    taken: set[tuple[ModelStage, int]] = set()
    kept: list[EMU] = []
    for unit in ordered:
        places = {(unit.model_stage, device) for device in unit.devices}
        if set(unit.devices) <= set(alive) and not places & taken:
            taken |= places
            kept.append(unit)
    return tuple(kept)


def one_layout(units: Iterable[EMU]) -> tuple[EMU, ...]:
    """The job runs on before the next transition, and a model-stage runs in one layout alone.

    Of several layouts the one with the most devices stays, then the first: the other units are copies of one state.
    """
    found = tuple(units)
    sizes: dict[ModelStage, Counter[Layout]] = {}
    for unit in found:
        sizes.setdefault(unit.model_stage, Counter())[unit.layout] += len(unit.devices)
    chosen = {ms: max(layouts, key=lambda layout: layouts[layout]) for ms, layouts in sizes.items()}
    return tuple(unit for unit in found if unit.layout == chosen[unit.model_stage])
