"""The `Executor` port at the coordinator: walks a transition DAG and has the workers carry it out (D6.4, D6.5).

Primitives on disjoint devices run at the same time; where devices overlap, the listed order holds. A commit group whose
members have all reported success becomes live; what has not been committed when something fails is let go of.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from nereus.core import (
    EMU,
    Destroy,
    EMUSet,
    InfeasibleError,
    Kind,
    LogicalState,
    Merge,
    ModelStage,
    NereusError,
    Offload,
    Outcome,
    Primitive,
    StateSchema,
    TransitionDAG,
    TransitionError,
)
from nereus.engine.connection import Message
from nereus.engine.crew import Crew, explain, grace_s
from nereus.engine.digest import digests, marks_of
from nereus.engine.progress import Progress, Traffic, one_layout, whole
from nereus.engine.transports.torch import SLOWEST_BYTES_PER_S
from nereus.transition.buckets import bucket_bytes, staging_bytes
from nereus.transition.fit import fit, stored_bytes
from nereus.transition.routes import fingerprint, goal_units, pair_bytes, source_units

log = logging.getLogger(__name__)

POLL_S = 0.05
_NUMBERS = count(1)
"""Of transitions in this process: a group's name is never used again, by another executor neither."""
SLOWEST_HASHED_BYTES_PER_S = 5e6
"""The same for hashes: a thorough one looks at every element by itself."""

Reports = Mapping[int, Message]
"""Device → what it answered."""
Digests = Mapping[tuple[str, Kind], int]


class TransitionExecutor:
    """Carries out transitions on the live state of a crew's workers.

    With `verify`, the hash of every logical tensor must be the same before and after.
    """

    def __init__(
        self, crew: Crew, schemas: Mapping[ModelStage, StateSchema], timeout_s: float = 60.0, verify: bool = False
    ) -> None:
        self._crew = crew
        self._schemas = schemas
        self._timeout_s = timeout_s
        self._verify = verify

    def check(self, dag: TransitionDAG) -> dict[int, int]:
        """Device → peak bytes, from what the ledgers hold now. Raises InfeasibleError before anything moves."""
        return self._fitted(dag, self._look(dag), self._traffic(dag))

    def execute(self, dag: TransitionDAG) -> Outcome:
        """Go from `dag.start` to `dag.goal`. What failed is in the outcome; its units are those that exist whole.

        After a failure no communication group is left on any device that took part.
        """
        started_s = time.perf_counter()
        progress = Progress(dag, list(dag.start), {})
        if dag.idle:
            return Outcome(dag.goal, True, 0.0)
        progress.allow(self._timeout_s)
        try:
            progress.traffic, reports = self._traffic(dag), self._look(dag)
            self._fitted(dag, reports, progress.traffic)
            moved_bytes = max(_most_bytes(progress.traffic.values()), staged_bytes(dag))
            progress.timeout_s = self._timeout_s + moved_bytes / SLOWEST_BYTES_PER_S
            self._begin(progress, reports)
            before = self._checked(dag)
            self._walk(progress)
            self._verified(dag, before)
        except InfeasibleError as error:
            return progress.outcome(dag.start, started_s, str(error))
        except NereusError as error:
            log.warning("transition stopped: %s", error)
            return progress.outcome(self._recover(progress, error), started_s, str(error))
        return progress.outcome(dag.goal, started_s, None)

    def _look(self, dag: TransitionDAG) -> Reports:
        """What every device that takes part says of itself. Raises TransitionError where their software differs."""
        reports = self._crew.call(sorted(dag.devices), Message("transition.look"), self._timeout_s)
        found = {device: report.fields["environment"] for device, report in reports.items()}
        first = min(found)
        for device, environment in found.items():
            if environment != found[first]:
                raise TransitionError(
                    f"device {device} runs {environment}, device {first} runs {found[first]}: "
                    "all devices of a transition need the same"
                )
        return reports

    def _fitted(self, dag: TransitionDAG, reports: Reports, traffic: Mapping[str, Traffic]) -> dict[int, int]:
        """Device → peak bytes, staging buffers included. Raises InfeasibleError."""
        staging: Counter[int] = Counter()  # a device runs one primitive at a time
        for primitive in dag.primitives:
            schema = self._schemas[primitive.model_stage]
            staging |= staging_bytes(traffic.get(primitive.id, {}), bucket_bytes(schema.tensors, schema.dtypes))
        stored = stored_bytes(dag.start, self._schemas)
        told = {device: report.fields for device, report in reports.items()}
        other = {d: fields["used_bytes"] - stored[d] + staging[d] for d, fields in told.items()}
        limits = {d: f["capacity_bytes"] for d, f in told.items() if f["capacity_bytes"] is not None}
        return fit(dag, self._schemas, limits, other)

    def _traffic(self, dag: TransitionDAG) -> Mapping[str, Traffic]:
        """What each acquiring primitive sends, by pair of devices."""
        return pair_bytes(dag, {ms: self._schemas[ms] for ms in _model_stages(dag)})

    def _begin(self, progress: Progress, reports: Reports) -> None:
        """The same routes everywhere; who reads whose memory; and one group of those that exchange messages."""
        dag = progress.dag
        members = sorted(dag.devices)
        fields: dict[str, Any] = {
            "dag": dag,
            "schemas": {ms: self._schemas[ms] for ms in _model_stages(dag)},
            "logical": _logical(dag, reports),
            "cards": {device: reports[device].fields["card"] for device in members},
            "timeout_s": progress.timeout_s,
        }
        fields["routes"] = fingerprint(dag, fields["schemas"])
        replies = self._ask(progress, members, Message("transition.begin", fields))
        for unit in dag.start:
            found = {device: replies[device].arrays for device in unit.devices if device in replies}
            name = str(unit.model_stage)
            progress.places |= {(device, unit): places[name] for device, places in found.items() if name in places}
        progress.apart = frozenset(
            (source, target)
            for pairs in progress.traffic.values()
            for source, target in pairs
            if source != target and not (source in replies[target].fields["reads"] and replies[source].fields["shown"])
        )
        if progress.apart:
            self._connect(progress)

    def _connect(self, progress: Progress) -> None:
        """A group of those that exchange messages, and a first byte over every pair of them that will be used."""
        members = sorted({device for pair in progress.apart for device in pair})
        fields = {"group": f"transition#{next(_NUMBERS)}", "members": members, "apart": progress.apart}
        self._ask(progress, members, Message("transition.connect", fields))

    def _checked(self, dag: TransitionDAG) -> dict[ModelStage, Digests]:
        """Replicas that a Merge reads are equal; with `verify` the digests of all that changes.

        Raises TransitionError that names the tensor.
        """
        found: dict[ModelStage, Digests] = {}
        for model_stage in _model_stages(dag):
            read = {unit for group in dag.groups.values() for unit in _merged(group, model_stage)}
            units = dag.start.of(model_stage) if self._verify else tuple(u for u in dag.start if u in read)
            if units:
                found[model_stage] = self._digests(model_stage, units)
        return found

    def _verified(self, dag: TransitionDAG, before: Mapping[ModelStage, Digests]) -> None:
        if not self._verify:
            return
        for model_stage, wanted in before.items():
            after = self._digests(model_stage, dag.goal.of(model_stage))
            changed = [f"{name} {kind}" for name, kind in wanted if after.get((name, kind)) != wanted[name, kind]]
            if changed:
                named = ", ".join(changed[:5])
                raise TransitionError(
                    f"{model_stage}: another hash after the transition: {named} ({len(changed)} in all)"
                )

    def _digests(self, model_stage: ModelStage, units: Iterable[EMU]) -> Digests:
        return logical_digests(self._crew, self._schemas[model_stage], units, self._timeout_s, self._verify)

    def _ask(self, progress: Progress, devices: Sequence[int], message: Message) -> Reports:
        progress.allow(self._timeout_s)
        return self._crew.call(devices, message, self._timeout_s)

    def _walk(self, progress: Progress) -> None:
        """All primitives and commits; the group is let go of in the same flight as what was committed last."""
        while not progress.complete:
            for group in progress.committable():
                self._commit(progress, group)
            for primitive in progress.startable():
                self._dispatch(progress, primitive)
            if progress.moved and not progress.ended:
                progress.ended = True
                self._announce(progress, "end", sorted(progress.dag.devices), Message("transition.end"))
            if not (progress.waiting or progress.telling):
                continue
            arrived = self._crew.poll(POLL_S)
            found = [progress.take(ticket, reply) for ticket, reply in arrived]
            errors = [error for error in found if error is not None]
            if errors:
                raise explain(errors)
            if not arrived and progress.passed_s > progress.allowed_s + grace_s(progress.allowed_s):
                owing = {*progress.waiting.values(), *progress.telling.values()}
                silent = ", ".join(sorted(f"device {device} in {name}" for name, device in owing))
                raise TransitionError(f"no answer within {progress.allowed_s:.3g} s from {silent}")

    def _dispatch(self, progress: Progress, primitive: Primitive) -> None:
        told: dict[str, Any]
        if isinstance(primitive, Destroy):
            (unit,) = primitive.sources
            if not any(other != unit and other.model_stage == unit.model_stage for other in progress.units):
                raise TransitionError(f"{primitive.id} would destroy the last copy: {unit}")
            progress.units.remove(unit)
            name, told = "transition.destroy", {"units": primitive.sources}
        elif isinstance(primitive, Offload):
            name, told = "transition.offload", {"units": primitive.sources}
        else:
            name, told = "transition.apply", {"primitive": primitive.id}
        progress.seconds[primitive.id] = time.perf_counter()
        progress.allow(progress.timeout_s)
        read = progress.read(primitive)
        lenders = progress.lenders(primitive) if name == "transition.apply" else None
        for device in progress.acting(primitive):
            lends = {} if lenders is None else {"lends": device in lenders}
            message = Message(name, told | lends, read.get(device, {}))
            progress.waiting[self._crew.submit(device, message)] = (primitive.id, device)

    def _commit(self, progress: Progress, group: str) -> None:
        """Every member has succeeded: from here on the goal units exist, whoever dies before it hears of it."""
        goals = goal_units(progress.dag, progress.dag.groups[group])
        progress.committed.add(group)
        progress.units.extend(goals)
        devices = sorted({device for goal in goals for device in goal.devices})
        self._announce(progress, f"commit of {group}", devices, Message("transition.commit", {"group": group}))

    def _announce(self, progress: Progress, name: str, devices: Sequence[int], message: Message) -> None:
        """Tell devices what needs no peer; they answer while they go on."""
        progress.allow(self._timeout_s)
        for device in devices:
            progress.telling[self._crew.submit(device, message)] = (name, device)

    def _recover(self, progress: Progress, error: NereusError) -> EMUSet:
        """Let running steps end, let go of what is not committed or not whole; the units that are left.

        A device that does not even answer that it has failed is ended: it must not wake up in the middle of other work.
        Its peers' deadline was its own too, so nobody waits for it a second time.
        """
        dag = progress.dag
        self._crew.settle(dag.devices, progress.allowed_s, progress.passed_s)
        goals = {unit for name in progress.committed for unit in goal_units(dag, dag.groups[name])}
        every = tuple(dict.fromkeys((*dag.start, *goals)))
        devices = dag.devices.union(*(unit.devices for unit in every))
        back_s = self._timeout_s + staged_bytes(dag) / SLOWEST_BYTES_PER_S
        for group in progress.committed:
            self._tell(devices, Message("transition.commit", {"group": group}), self._timeout_s)
        replies = self._tell(devices, Message("transition.abort", {"error": str(error)}), back_s)
        kept = one_layout(whole(progress.units, goals, self._crew.started()))
        staged = {unit for reply in replies.values() for unit in reply.fields["staged"]}
        for unit in staged & set(kept):
            if any(other.model_stage == unit.model_stage for other in kept if other not in staged):
                kept = tuple(other for other in kept if other != unit)
            else:
                log.error("%s stays in host memory: there is no room for it on its devices", unit)
        gone = [unit for unit in every if unit not in kept]
        self._tell(devices, Message("transition.destroy", {"units": gone}), self._timeout_s)
        return EMUSet(whole(kept, goals, self._crew.started()))

    def _tell(self, devices: Collection[int], message: Message, timeout_s: float) -> Reports:
        """To those that are left, and what each answered; one that does not answer is ended like any other."""
        tickets = {device: self._crew.submit(device, message) for device in sorted(set(devices) & self._crew.started())}
        replies = self._crew.gather(tickets.values(), timeout_s)
        found = {device: replies[ticket] for device, ticket in tickets.items()}
        for device, reply in found.items():
            if isinstance(reply, NereusError):
                log.warning("device %d, %s while ending a transition: %s", device, message.name, reply)
        self._crew.settle(devices, timeout_s, timeout_s + grace_s(timeout_s))
        return {device: reply for device, reply in found.items() if isinstance(reply, Message)}


def logical_digests(
    crew: Crew, schema: StateSchema, units: Iterable[EMU], timeout_s: float, thorough: bool = True
) -> Digests:
    """The digest of each logical tensor and kind of one model-stage, `thorough`: the same however it is cut.

    `timeout_s` is for the round trip alone; hashing has more for more bytes.
    Raises TransitionError that names the tensor where replicas differ.
    """
    units = tuple(units)
    marks = marks_of(schema, units)
    stored = stored_bytes(EMUSet(units), {unit.model_stage: schema for unit in units})
    timeout_s += max(stored.values(), default=0) / SLOWEST_HASHED_BYTES_PER_S
    on = {device: unit for unit in units for device in unit.devices}
    fields = {"units": dict.fromkeys(units, marks), "thorough": thorough}
    replies = crew.call(sorted(on), Message("transition.hash", fields), timeout_s)
    held: dict[int, tuple[EMU, Any]] = {d: (on[d], r.arrays[str(on[d].model_stage)]) for d, r in replies.items()}
    return digests(schema, marks, held)


def _model_stages(dag: TransitionDAG) -> list[ModelStage]:
    """Those that change, in a fixed order."""
    return sorted({primitive.model_stage for primitive in dag.primitives}, key=lambda ms: ms.sort_key)


def _logical(dag: TransitionDAG, reports: Reports) -> dict[ModelStage, LogicalState]:
    """The counters of each model-stage that changes. Raises TransitionError when its positions disagree."""
    changing = set(_model_stages(dag))
    found: dict[ModelStage, LogicalState] = {}
    for device in sorted(dag.start.devices & dag.devices):
        for model_stage, logical in reports[device].fields["logical"].items():
            if model_stage in changing and found.setdefault(model_stage, logical) != logical:
                raise TransitionError(
                    f"{model_stage}: device {device} is at {logical}, others are at {found[model_stage]}; "
                    "finish the update on every unit first"
                )
    return found


def _merged(group: Iterable[Primitive], model_stage: ModelStage) -> tuple[EMU, ...]:
    """The units of a model-stage that a group puts together; none where it reads one alone."""
    group = tuple(group)
    if group[0].model_stage != model_stage or not any(isinstance(step, Merge) for step in group):
        return ()
    units = source_units(group)
    return units if len(units) > 1 else ()


def staged_bytes(dag: TransitionDAG) -> int:
    """The most bytes that one device sends to host memory, all its units together."""
    sizes: Counter[int] = Counter()
    for primitive in dag.primitives:
        if isinstance(primitive, Offload):
            sizes.update(primitive.releases)
    return max(sizes.values(), default=0)


def _most_bytes(traffic: Iterable[Traffic]) -> int:
    """The most bytes that one device sends or receives in one primitive."""
    most = 0
    for pairs in traffic:
        sides: Counter[tuple[str, int]] = Counter()
        for (source, target), size in pairs.items():
            sides.update({("out", source): size, ("in", target): size})
        most = max(most, *sides.values(), 0)
    return most
