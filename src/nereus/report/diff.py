"""What lies between two plans of one job: the order of its primitives, seconds, bytes, memory, as rows to show.

Its keys as JSON are a promise: docs/transitions.md explains every one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nereus.controller.changes import changes
from nereus.controller.outlook import settled
from nereus.core import (
    EMU,
    EMUSet,
    InfeasibleError,
    ModelStage,
    Offload,
    Outcome,
    Plan,
    StateSchema,
    TransitionDAG,
    codec,
    expand,
)
from nereus.core.sizes import show_bytes
from nereus.cost.state import schemas
from nereus.planning.judge import misfit
from nereus.planning.problem import Problem
from nereus.report import devices
from nereus.transition.budget import Budget
from nereus.transition.compile import connect
from nereus.transition.estimate import estimate
from nereus.transition.fit import peak_bytes, stored_bytes
from nereus.transition.minimum import composed_bytes, minimum_bytes
from nereus.transition.place import place
from nereus.transition.site import Site
from nereus.transition.timeline import Load, Loads, critical_path, timeline

SCHEMA = 1
"""Raised when a key changes its meaning or goes; new keys may come."""
TRIES = 32
"""How often the capacity is raised to find the one that would do."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Two plans of one job. The devices of `problem` are those that exist now; the goal uses none that is `lost`."""

    names: tuple[str, str]
    before: Plan
    after: Plan
    problem: Problem
    lost: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    outcome: Outcome | None = None
    """What the transition took when a run made it."""
    across: bool = False
    """Whether positions that the plan puts on one node may be torn apart."""
    host_bytes: int | None = None
    """Host memory of each node that units may be staged in where nothing else fits; None: what the cluster says."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A primitive that another waits for; `kind` is `state` or `resource`."""

    id: str
    kind: str


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit; devices in (pp rank, tp rank) order."""

    layout: str
    devices: tuple[int, ...]


WAITS = 6


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive. Acquired and released bytes are of all its devices together."""

    id: str
    primitive: str
    model_stage: str
    group: str
    sources: tuple[Unit, ...]
    targets: tuple[Unit, ...]
    devices: tuple[int, ...]
    start_s: float
    end_s: float
    critical: bool
    after: tuple[Wait, ...]
    cause: str | None
    """What it waited for last, by id: one of `after`, or what ran on one of its devices until then."""
    link_bytes: Mapping[str, int]
    acquires_bytes: int
    releases_bytes: int
    host_bytes: int
    """Host memory that an Offload takes, until the unit's Destroy."""
    forwards: bool
    """Whether it reads units that this transition itself has built."""

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s

    @property
    def waits(self) -> list[str]:
        """What it waits for, in words; the first few of many."""
        more = [f"{len(self.after) - WAITS:,} more"] if len(self.after) > WAITS else []
        return [*(f"{wait.id} ({wait.kind})" for wait in self.after[:WAITS]), *more]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one model-stage, or of all: by kind of link, and what must and what the paper's composition would."""

    model_stage: str
    link_bytes: Mapping[str, int]
    minimum_bytes: int
    composed_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Over all links."""
        return sum(self.link_bytes.values())

    @property
    def over_minimum(self) -> float | None:
        """Moved / minimum; None when nothing has to move."""
        return self.moved_bytes / self.minimum_bytes if self.minimum_bytes else None

    @property
    def composed_over_minimum(self) -> float | None:
        """Composed / minimum; None when nothing has to move."""
        return self.composed_bytes / self.minimum_bytes if self.minimum_bytes else None


@dataclass(frozen=True, slots=True)
class Level:
    """State on devices with equal contents: before, at most during, and after the transition."""

    where: str
    devices: tuple[int, ...]
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    usable_bytes: int

    @property
    def share(self) -> float:
        """Peak of what may be used."""
        return self.peak_bytes / self.usable_bytes


@dataclass(frozen=True, slots=True)
class Diff:
    """Everything that is shown of a transition."""

    names: tuple[str, str]
    changes: str
    stages: Mapping[str, str]
    """Model-stage → what becomes of its layout, in words."""
    seconds: float
    """`overhead_s` and the primitives; nothing when no state moves."""
    overhead_s: float
    """What transitions of this job were seen to take beside their primitives, learnt by a run."""
    step_s: tuple[float | None, float]
    """Predicted step before and after; None when the first plan cannot run any more."""
    steps: tuple[Step, ...]
    moved: tuple[Moved, ...]
    total: Moved
    levels: tuple[Level, ...]
    critical_path: tuple[str, ...]
    notes: tuple[str, ...]
    dag: TransitionDAG
    problem: Problem
    outcome: Outcome | None

    @property
    def over_bound(self) -> float | None:
        """How long the order takes over a bound that no order is below, in the scheduler's model; None without one."""
        return self.dag.span_bytes / self.dag.bound_bytes if self.dag.bound_bytes else None

    @property
    def pays_back_steps(self) -> float | None:
        """Steps until the saving repays the transition; None when there is none."""
        before, after = self.step_s
        return None if before is None or before <= after else self.seconds / (before - after)

    def described(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": SCHEMA,
            "from": self.names[0],
            "to": self.names[1],
            "changes": self.changes,
            "notes": list(self.notes),
            "seconds": self.seconds,
            "overhead_s": self.overhead_s,
            "step_s": {"before": self.step_s[0], "after": self.step_s[1]},
            "pays_back_steps": self.pays_back_steps,
            "critical_path": list(self.critical_path),
            "order": {"over_bound": self.over_bound, "certified": self.dag.certified},
            "primitives": [asdict(step) | {"seconds": step.seconds} for step in self.steps],
            "bytes": {row.model_stage: _bytes(row) for row in (*self.moved, self.total)},
            "memory": [asdict(row) | {"share": row.share} for row in self.levels],
            "goal": codec.encode(self.dag.goal),
            "measured": None if self.outcome is None else codec.encode(self.outcome),
        }


def _bytes(row: Moved) -> dict[str, Any]:
    return {
        **row.link_bytes,
        "moved": row.moved_bytes,
        "minimum": row.minimum_bytes,
        "composed": row.composed_bytes,
        "moved_over_minimum": row.over_minimum,
        "composed_over_minimum": row.composed_over_minimum,
    }


def diff(asked: Asked) -> Diff:
    """The transition between two plans. Raises InfeasibleError when the goal or the way to it does not fit."""
    problem = asked.problem
    model = problem.model()
    if reason := misfit(problem, model, asked.after):
        raise InfeasibleError(f"{asked.names[1]}: {reason}", reason.short_bytes)
    held = schemas(problem.workflow)
    start = expand(asked.before).without_devices(asked.lost)
    dag = _way(asked, start, held)
    placed = settled(asked.after, dag.goal)
    notes = list(asked.notes)
    if misfit(problem, model, placed):
        # Dealing positions to move least has put together on one device what the plan had kept apart.
        placed, dag = asked.after, _connected(asked, start, expand(asked.after), held)
        notes.append("positions are those that the plan names: with fewer bytes to move, memory would not do")
    loads = Loads(dag, held, problem.cluster).of
    found = estimate(dag, held, problem.cluster, problem.calibration)
    total = Moved("all", found.link_bytes, found.minimum_bytes, found.composed_bytes)
    if total.moved_bytes > total.minimum_bytes and not asked.across:
        notes.append("M* lets positions cross nodes; here those that the plan puts on one node stay together")
    return Diff(
        names=asked.names,
        changes=changes(asked.before, asked.after),
        stages={str(ms): _becomes(start.of(ms), dag.goal.of(ms)) for ms in dag.goal.model_stages},
        seconds=found.seconds,
        overhead_s=problem.calibration.transition_overhead_s if not dag.idle else 0.0,
        step_s=(
            None if asked.lost & asked.before.devices else model.estimate(asked.before).step_s,
            model.estimate(placed).step_s,
        ),
        steps=_steps(dag, loads, problem),
        moved=_moved(dag, loads, held),
        total=total,
        levels=_levels(dag, held, problem),
        critical_path=found.critical_path,
        notes=tuple(notes),
        dag=dag,
        problem=problem,
        outcome=asked.outcome,
    )


def _way(asked: Asked, start: EMUSet, held: Mapping[ModelStage, StateSchema]) -> TransitionDAG:
    """The transition; positions are dealt so that least moves."""
    site = Site.of(asked.problem.cluster)
    goal = place(start, asked.after, held, replace(site, node_of={}) if asked.across else site)
    return _connected(asked, start, goal, held)


def _connected(asked: Asked, start: EMUSet, goal: EMUSet, held: Mapping[ModelStage, StateSchema]) -> TransitionDAG:
    """The transition to settled positions; when memory allows none, the error says what capacity would."""
    problem = asked.problem
    usable = problem.capacity()
    site = Site.of(problem.cluster)
    host_bytes = problem.cluster.host_bytes()
    if asked.host_bytes is not None:
        host_bytes = dict.fromkeys(site.node_of.values(), asked.host_bytes)
    more, reason = dict(usable), ""
    for _ in range(TRIES):
        try:
            dag = connect(start, goal, held, Budget(more, host_bytes=host_bytes), site)
        except InfeasibleError as error:
            if not error.short_bytes:  # not for want of memory
                raise
            reason = reason or str(error)
            for device, lacking in error.short_bytes.items():
                more[device] += lacking
            continue
        if not reason:
            return dag
        break
    raised = {device: size - usable[device] for device, size in more.items() if size > usable[device]}
    needed = {device: problem.needed_capacity(more[device], device) for device in raised}
    device = max(needed, key=lambda d: (needed[d], -d))
    capacity = problem.cluster.kind(device).memory_bytes
    raise InfeasibleError(
        f"{reason}; that is what a plan may use of {capacity:,} bytes, {needed[device]:,} "
        f"({show_bytes(needed[device])}) would do",
        raised,
    )


def _becomes(before: tuple[EMU, ...], after: tuple[EMU, ...]) -> str:
    """`tp2 pp4 dp4 → tp4 pp2 dp6`."""
    if set(before) == set(after):
        return f"{degrees(after)} stays as it is"
    if degrees(before) == degrees(after):
        return f"{degrees(after)} on other devices"
    return f"{degrees(before)} → {degrees(after)}"


def degrees(units: tuple[EMU, ...]) -> str:
    """Layout and number of units; several where a transition stopped half-way."""
    counts: dict[str, int] = {}
    for unit in units:
        counts[str(unit.layout)] = counts.get(str(unit.layout), 0) + 1
    return " + ".join(f"{layout} dp{count}" for layout, count in counts.items())


def _steps(dag: TransitionDAG, loads: Mapping[str, Load], problem: Problem) -> tuple[Step, ...]:
    """Primitives in execution order; the clock starts with the first."""
    spans = timeline(dag, loads)
    critical = frozenset(critical_path(spans))
    scale = problem.calibration.transition_scale
    built = frozenset(dag.goal) - frozenset(dag.start)
    waits: dict[str, list[Wait]] = {}
    for edge in dag.edges:
        waits.setdefault(edge.later, []).append(Wait(edge.earlier, edge.kind.value))
    return tuple(
        Step(
            id=primitive.id,
            primitive=primitive.name,
            model_stage=str(primitive.model_stage),
            group=primitive.group,
            sources=tuple(Unit(str(unit.layout), unit.devices) for unit in primitive.sources),
            targets=tuple(Unit(str(unit.layout), unit.devices) for unit in primitive.targets),
            devices=tuple(sorted(primitive.devices)),
            start_s=scale * spans[primitive.id].start_s,
            end_s=scale * spans[primitive.id].end_s,
            critical=primitive.id in critical,
            after=tuple(waits.get(primitive.id, ())),
            cause=spans[primitive.id].cause,
            link_bytes=loads[primitive.id].link_bytes if primitive.id in loads else {},
            acquires_bytes=sum(primitive.acquires.values()),
            releases_bytes=sum(primitive.releases.values()),
            host_bytes=sum(primitive.hosts.values()) if isinstance(primitive, Offload) else 0,
            forwards=not built.isdisjoint(primitive.sources),
        )
        for primitive in dag.primitives
    )


def _moved(dag: TransitionDAG, loads: Mapping[str, Load], held: Mapping[ModelStage, StateSchema]) -> tuple[Moved, ...]:
    """The model-stages that change, in stage order."""
    rows = []
    for ms in dag.goal.model_stages:
        before, after = dag.start.blocks(ms), dag.goal.blocks(ms)
        if before == after:
            continue
        links = Counter(intra=0, inter=0)
        for primitive in dag.primitives:
            if primitive.model_stage == ms and primitive.id in loads:
                links.update(loads[primitive.id].link_bytes)
        least, composed = minimum_bytes(held[ms], before, after), composed_bytes(held[ms], before, after)
        rows.append(Moved(str(ms), dict(links), least, composed))
    return tuple(rows)


def _levels(dag: TransitionDAG, held: Mapping[ModelStage, StateSchema], problem: Problem) -> tuple[Level, ...]:
    """Devices with equal levels together, the fullest first."""
    before, after, peak = stored_bytes(dag.start, held), stored_bytes(dag.goal, held), peak_bytes(dag, held)
    groups: dict[tuple[int, int, int, int], list[int]] = {}
    usable = problem.capacity()
    for device in problem.cluster.ids:
        if device in peak or device in after:
            most = max(peak.get(device, 0), after[device])
            key = (before[device], most, after[device], usable[device])
            groups.setdefault(key, []).append(device)
    rows = (Level(devices.where(ids, problem.cluster, devices.SPANS), tuple(ids), *key) for key, ids in groups.items())
    return tuple(sorted(rows, key=lambda row: -row.share))
