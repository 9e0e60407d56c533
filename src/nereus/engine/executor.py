"""The `Executor` port at the coordinator: walks a transition DAG and has the workers carry it out (D6.4, D6.5).

Primitives on disjoint devices run at the same time; where devices overlap, the listed order holds. A commit group whose
members have all reported success becomes live; what has not been committed when something fails is let go of.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from nereus.core import (
    EMU,
    Destroy,
    EMUSet,
    InfeasibleError,
    Layout,
    LogicalState,
    ModelStage,
    NereusError,
    Outcome,
    Primitive,
    StateSchema,
    TransitionDAG,
    TransitionError,
)
from nereus.engine.connection import Message
from nereus.engine.crew import Crew, Reply, explain
from nereus.transition.buckets import bucket_bytes, staging_bytes
from nereus.transition.fit import fit, stored_bytes
from nereus.transition.flows import Flow
from nereus.transition.routes import flows_of, goal_units

log = logging.getLogger(__name__)

POLL_S = 0.05

Traffic = dict[tuple[int, int], int]
"""(source, target) → bytes."""


@dataclass(slots=True)
class _Progress:
    """How far a transition has come."""

    dag: TransitionDAG
    units: list[EMU]
    traffic: Mapping[str, Traffic]
    done: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    waiting: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Ticket under way → primitive and device."""
    received_bytes: Counter[int] = field(default_factory=Counter)
    sent_bytes: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def devices(self, primitive: Primitive) -> frozenset[int]:
        """Its own devices, and those that send to them without keeping anything of what it makes."""
        return primitive.devices.union(*self.traffic.get(primitive.id, {}))

    def startable(self) -> list[Primitive]:
        """In listed order; one that cannot start yet keeps its devices from those after it."""
        before = self.dag.predecessors()
        groups = {p.id: p.group for p in self.dag.primitives if not isinstance(p, Destroy)}
        running = {name for name, _ in self.waiting.values()}
        taken: set[int] = set()
        found: list[Primitive] = []
        for primitive in self.dag.primitives:
            if primitive.id in self.done:
                continue
            needed = before[primitive.id]
            devices = self.devices(primitive)
            free = primitive.id not in running and not devices & taken and needed <= self.done
            if isinstance(primitive, Destroy):
                free = free and {groups[name] for name in needed if name in groups} <= self.committed
            if free:
                found.append(primitive)
            taken |= devices
        return found

    def take(self, ticket: int, reply: Reply) -> NereusError | None:
        """Enter one reply. A primitive is done when all its devices have received what the plan says; else an error."""
        if ticket not in self.waiting:
            return None
        name, device = self.waiting.pop(ticket)
        if isinstance(reply, NereusError):
            return reply
        if reply.name == "transition.apply":
            received, sent = reply.fields["received_bytes"], reply.fields["sent_bytes"]
            planned = sum(size for (_, target), size in self.traffic[name].items() if target == device)
            if received != planned:
                return TransitionError(
                    f"{name}: device {device} received {received:,} bytes, the plan says {planned:,}"
                )
            self.received_bytes[device] += received
            self.sent_bytes[device] += sent
        if name not in {other for other, _ in self.waiting.values()}:
            self.done.add(name)
            self.seconds[name] = time.perf_counter() - self.seconds[name]
        return None

    def committable(self) -> list[str]:
        """Commit groups whose primitives have all succeeded on every member."""
        return [
            name
            for name, primitives in self.dag.groups.items()
            if name not in self.committed and {primitive.id for primitive in primitives} <= self.done
        ]


class TransitionExecutor:
    """Carries out transitions on the live state of a crew's workers."""

    def __init__(self, crew: Crew, schemas: Mapping[ModelStage, StateSchema], timeout_s: float = 60.0) -> None:
        self._crew = crew
        self._schemas = schemas
        self._timeout_s = timeout_s
        self._epoch = 0

    def check(self, dag: TransitionDAG) -> dict[int, int]:
        """Device → peak bytes, from what the ledgers hold now. Raises InfeasibleError before anything moves."""
        devices = sorted(dag.devices)
        reports = self._crew.call(devices, Message("memory"), self._timeout_s)
        stored = stored_bytes(dag.start, self._schemas)
        staging = self._staging(dag)
        other = {d: r.fields["used_bytes"] - stored[d] + staging.get(d, 0) for d, r in reports.items()}
        limits = {d: r.fields["capacity_bytes"] for d, r in reports.items() if r.fields["capacity_bytes"] is not None}
        return fit(dag, self._schemas, limits, other)

    def _staging(self, dag: TransitionDAG) -> Counter[int]:
        """Device → the most that staging buffers take of it: a device runs one primitive at a time."""
        most: Counter[int] = Counter()
        traffic = self._traffic(dag)
        for primitive in dag.primitives:
            schema = self._schemas[primitive.model_stage]
            most |= staging_bytes(traffic.get(primitive.id, {}), bucket_bytes(schema.tensors, schema.dtypes))
        return most

    def execute(self, dag: TransitionDAG) -> Outcome:
        """Go from `dag.start` to `dag.goal`. What failed is in the outcome; its units are those that exist whole.

        After a failure no communication group is left on any device that took part.
        """
        started_s = time.perf_counter()
        progress = _Progress(dag, list(dag.start), {})
        if not dag.primitives:
            return Outcome(dag.goal, True, 0.0)
        try:
            self.check(dag)
            progress.traffic = self._traffic(dag)
            self._begin(dag)
            self._walk(progress)
            self._crew.call(sorted(dag.devices), Message("transition.end"), self._timeout_s)
        except InfeasibleError as error:
            return _outcome(progress, dag.start, started_s, str(error))
        except NereusError as error:
            log.warning("transition stopped: %s", error)
            return _outcome(progress, self._recover(progress), started_s, str(error))
        return _outcome(progress, dag.goal, started_s, None)

    def _traffic(self, dag: TransitionDAG) -> dict[str, Traffic]:
        """What each acquiring primitive sends, by pair of devices."""
        found: dict[str, Traffic] = {}
        for model_stage in {primitive.model_stage for primitive in dag.primitives}:
            schema = self._schemas[model_stage]
            for name, flows in flows_of(dag, model_stage, schema).items():
                found[name] = _pairs(flows, schema.element_bytes)
        return found

    def _begin(self, dag: TransitionDAG) -> None:
        """One group of all members; every worker gets the DAG and the counters of each model-stage."""
        self._epoch += 1
        members = sorted(dag.devices)
        model_stages = {primitive.model_stage for primitive in dag.primitives}
        fields = {
            "dag": dag,
            "schemas": {ms: self._schemas[ms] for ms in model_stages},
            "logical": self._logical(dag),
            "group": f"transition#{id(self)}.{self._epoch}",
            "members": members,
        }
        self._crew.call(members, Message("transition.begin", fields), self._timeout_s)

    def _logical(self, dag: TransitionDAG) -> dict[ModelStage, LogicalState]:
        """The counters of each model-stage. Raises TransitionError when its positions disagree."""
        devices = sorted(dag.start.devices & dag.devices)
        changing = {primitive.model_stage for primitive in dag.primitives}
        found: dict[ModelStage, LogicalState] = {}
        for device, reply in self._crew.call(devices, Message("transition.logical"), self._timeout_s).items():
            for model_stage, logical in reply.fields["logical"].items():
                if model_stage not in changing:
                    continue
                if found.setdefault(model_stage, logical) != logical:
                    raise TransitionError(
                        f"{model_stage}: device {device} is at {logical}, others are at {found[model_stage]}; "
                        "finish the update on every unit first"
                    )
        return found

    def _walk(self, progress: _Progress) -> None:
        heard_s = time.monotonic()
        while len(progress.done) < len(progress.dag.primitives) or progress.committable():
            for group in progress.committable():
                self._commit(progress, group)
            for primitive in progress.startable():
                self._dispatch(progress, primitive)
            if not progress.waiting:
                continue
            arrived = self._crew.poll(POLL_S)
            found = [progress.take(ticket, reply) for ticket, reply in arrived]
            errors = [error for error in found if error is not None]
            if errors:
                raise explain(errors)
            if arrived:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > self._timeout_s:
                names = ", ".join(sorted({name for name, _ in progress.waiting.values()}))
                raise TransitionError(f"no device answered for {self._timeout_s:g} s while running {names}")

    def _dispatch(self, progress: _Progress, primitive: Primitive) -> None:
        if isinstance(primitive, Destroy):
            (unit,) = primitive.sources
            if not any(other != unit and other.model_stage == unit.model_stage for other in progress.units):
                raise TransitionError(f"{primitive.id} would destroy the last copy: {unit}")
            progress.units.remove(unit)
            message = Message("transition.destroy", {"units": primitive.sources})
        else:
            message = Message("transition.apply", {"primitive": primitive.id})
        progress.seconds[primitive.id] = time.perf_counter()
        for device in sorted(progress.devices(primitive)):
            progress.waiting[self._crew.submit(device, message)] = (primitive.id, device)

    def _commit(self, progress: _Progress, group: str) -> None:
        """Every member has succeeded: from here on the goal units exist, whoever dies before it hears of it."""
        goals = goal_units(progress.dag, progress.dag.groups[group])
        progress.committed.add(group)
        progress.units.extend(goals)
        devices = sorted({device for goal in goals for device in goal.devices})
        self._crew.call(devices, Message("transition.commit", {"group": group}), self._timeout_s)

    def _recover(self, progress: _Progress) -> EMUSet:
        """Let running steps end, let go of what is not committed or not whole; the units that are left."""
        try:
            self._crew.wait(list(progress.waiting), self._timeout_s)
        except NereusError as error:
            log.info("a step of the stopped transition ended: %s", error)
        alive = self._crew.started()
        goals = {unit for name in progress.committed for unit in goal_units(progress.dag, progress.dag.groups[name])}
        kept = _one_layout(_whole(progress.units, goals, alive))
        gone = [unit for unit in dict.fromkeys((*progress.dag.start, *goals)) if unit not in kept]
        devices = progress.dag.devices.union(*(unit.devices for unit in gone))
        for group in progress.committed:
            self._tell(devices, Message("transition.commit", {"group": group}))
        self._tell(devices, Message("transition.abort"))
        self._tell(devices, Message("transition.destroy", {"units": gone}))
        return EMUSet(kept)

    def _tell(self, devices: Collection[int], message: Message) -> None:
        """To those that are left; another death changes nothing about the rest."""
        try:
            self._crew.call(sorted(set(devices) & self._crew.started()), message, self._timeout_s)
        except NereusError as error:
            log.warning("%s while ending a transition: %s", message.name, error)


def _outcome(progress: _Progress, units: EMUSet, started_s: float, error: str | None) -> Outcome:
    return Outcome(
        units,
        error is None,
        time.perf_counter() - started_s,
        dict(progress.received_bytes),
        dict(progress.sent_bytes),
        {name: seconds for name, seconds in progress.seconds.items() if name in progress.done},
        error,
    )


def _whole(units: Iterable[EMU], committed: Collection[EMU], alive: Collection[int]) -> tuple[EMU, ...]:
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


def _one_layout(units: Iterable[EMU]) -> tuple[EMU, ...]:
    """The job runs on before the next transition, and a model-stage runs in one layout alone.

    Of several layouts the one with the most devices stays, then the first: the other units are copies of one state.
    """
    found = tuple(units)
    sizes: dict[ModelStage, Counter[Layout]] = {}
    for unit in found:
        sizes.setdefault(unit.model_stage, Counter())[unit.layout] += len(unit.devices)
    chosen = {ms: max(layouts, key=lambda layout: layouts[layout]) for ms, layouts in sizes.items()}
    return tuple(unit for unit in found if unit.layout == chosen[unit.model_stage])


def _pairs(flows: Iterable[Flow], element_bytes: int) -> Traffic:
    found: Counter[tuple[int, int]] = Counter()
    for flow in flows:
        found[flow.source, flow.target] += flow.elements * element_bytes
    return dict(found)
