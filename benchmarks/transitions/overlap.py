"""Overlap trials on real processes (the paper's Table 5): one global order against local orders that hold and wait.

The other side runs each model-stage's own transition by itself: its steps in an order that its own state allows, drawn
at random; a step takes its devices one after another, keeps those it has while it waits for the next or for memory,
and gives them back when it is done. When nothing runs and nobody can get a device, no time helps: that is a deadlock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from rich.table import Table

from benchmarks._result import Result, at_least
from benchmarks.transitions.live import PROGRAM, schema
from benchmarks.transitions.state import Size
from benchmarks.transitions.trials import CRITIC, KINDS, REWARD, Kind, Trial, drawn
from nereus.core import EMU, Destroy, EdgeKind, EMUSet, ModelStage, NereusError, Primitive, StateSchema, TransitionDAG
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.engine.executor import TransitionExecutor
from nereus.engine.worker import DeviceSettings
from nereus.transition import connect
from nereus.transition.budget import Budget

TRIALS, DEADLINE_S, WAIT_S, POLL_S = 100, 2.0, 30.0, 0.002
SLACK = 0.4
"""Of the smallest share: room for buffers, not for a second unit."""
SIZE, OTHER = Size(256, 704, 1, 8, 4, 1152), Size(256, 704, 1, 8, 4, 1088)
"""16 MB; two models differ in shape, so that none can be taken for the other."""
GROUP = "trials"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One trial of one side."""

    succeeded: bool
    seconds: float
    what: str
    edges: int = 0


class Bench:
    """A crew on which trial after trial is set up and carried out."""

    def __init__(self, kind: Kind) -> None:
        self.sizes = {ms: OTHER if ms in (CRITIC, REWARD) else SIZE for ms in kind.model_stages}
        self.schemas: Mapping[ModelStage, StateSchema] = {ms: schema(size) for ms, size in self.sizes.items()}
        shares = [size.bytes for size in self.sizes.values()]
        self.capacity = {device: int(max(shares) + SLACK * min(shares) / 2) for device in range(kind.devices)}
        settings = {device: DeviceSettings(capacity_bytes=room) for device, room in self.capacity.items()}
        self.crew = Crew(settings, PROGRAM, timeout_s=WAIT_S)
        self.devices = sorted(self.capacity)
        self.executor = TransitionExecutor(self.crew, self.schemas, WAIT_S)
        self.crew.start(self.devices)
        self.crew.wait_ready(self.devices, 4 * WAIT_S)

    def ours(self, trial: Trial) -> Outcome:
        """One transition of both, once both are called for."""
        self._set_up(trial)
        began_s = time.perf_counter()
        time.sleep(max(trial.launch_s.values()))
        try:
            dag = connect(trial.start, trial.goal, self.schemas, Budget(self.capacity))
            outcome = self.executor.execute(dag)
        except NereusError as error:
            return Outcome(False, DEADLINE_S, str(error))
        edges = sum(edge.kind == EdgeKind.RESOURCE for edge in dag.edges)
        return self._judged(trial, time.perf_counter() - began_s, outcome.error, edges)

    def local(self, trial: Trial) -> Outcome:
        """Each model-stage by itself."""
        self._set_up(trial)
        ample = dict.fromkeys(self.devices, 1 << 40)
        components = []
        for number, ms in enumerate(sorted(trial.launch_s, key=str)):
            rng = random.Random(f"{trial.seed} {number}")
            dag = connect(EMUSet(trial.start.of(ms)), EMUSet(trial.goal.of(ms)), self.schemas, Budget(ample))
            components.append(Component(dag, trial.launch_s[ms], rng))
        seconds, error = Market(self, trial, components).run()
        return self._judged(trial, seconds, error)

    def close(self) -> None:
        """End the workers."""
        self.crew.close()

    def _set_up(self, trial: Trial) -> None:
        self._call("bench.clear")
        for unit in trial.start:
            ms = unit.model_stage
            fields = {"unit": unit, "schema": self.schemas[ms], "size": self.sizes[ms]}
            self.crew.call(unit.devices, Message("bench.load", fields), WAIT_S)
        self._call("bench.group", {"name": f"{GROUP} {time.monotonic_ns()}", "members": self.devices})

    def _judged(self, trial: Trial, seconds: float, error: str | None, edges: int = 0) -> Outcome:
        """The goal's units and nothing else, every bit of them right."""
        if error is not None:
            return Outcome(False, DEADLINE_S, error, edges)
        replies = self._call("bench.units", {"sizes": self.sizes})
        for device, reply in replies.items():
            wanted = set(trial.goal.on(device))
            if set(reply.fields["units"]) != wanted or reply.fields["names"]:
                what = f"device {device} holds {reply.fields['units']}, differing: {reply.fields['names'][:3]}"
                return Outcome(False, DEADLINE_S, what, edges)
        late = seconds > DEADLINE_S
        return Outcome(not late, min(seconds, DEADLINE_S), f"after {seconds:.2f} s" if late else "", edges)

    def _call(self, name: str, fields: Mapping[str, object] | None = None) -> Mapping[int, Message]:
        return self.crew.call(self.devices, Message(name, dict(fields or {})), WAIT_S)


@dataclass(slots=True)
class Component:
    """One model-stage's transition: a random order of its steps in which each follows those it waits for."""

    dag: TransitionDAG
    launch_s: float
    rng: random.Random
    steps: list[Primitive] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        before = self.dag.predecessors()
        waiting = list(self.dag.primitives)
        while waiting:
            ready = [step for step in waiting if not before[step.id] & {other.id for other in waiting}]
            step = self.rng.choice(ready)
            waiting.remove(step)
            self.steps.append(step)

    def next_device(self) -> int | None:
        """One that the step under way still lacks; None when it has all."""
        wanted = sorted(self.steps[0].devices - self.held)
        return self.rng.choice(wanted) if wanted else None


class Market:
    """Devices are taken by whoever comes; everything else runs on the workers."""

    def __init__(self, bench: Bench, trial: Trial, components: Sequence[Component]) -> None:
        self.bench, self.components = bench, components
        self.units = list(trial.start)

    def run(self) -> tuple[float, str | None]:
        """Seconds since the first launch, and why it has not come to its end."""
        began_s = time.perf_counter()
        while any(component.steps for component in self.components):
            now_s = time.perf_counter() - began_s
            if now_s > DEADLINE_S + max(component.launch_s for component in self.components):
                return now_s, "not done by the deadline"
            launched = [component for component in self.components if component.launch_s <= now_s]
            moved = [self._step(component) for component in launched if component.steps]
            busy = any(component.running for component in self.components)
            if not busy and not any(moved) and len(launched) == len(self.components):
                return now_s, "deadlock: " + "; ".join(
                    f"{a.steps[0]} holds {sorted(a.held)}" for a in self.components if a.steps
                )
            self._hear()
        return time.perf_counter() - began_s, None

    def _step(self, component: Component) -> bool:
        """Take one more device, or begin. False when neither can be done."""
        if component.running:
            return False
        step, device = component.steps[0], component.next_device()
        if device is None:
            self._begin(component, step)
            return True
        tries = sorted(step.devices - component.held, key=lambda each: each != device)
        for each in tries:
            if self._may_take(each, step):
                component.held.add(each)
                return True
        return False

    def _may_take(self, device: int, step: Primitive) -> bool:
        if any(device in component.held for component in self.components):
            return False
        used = sum(self._share(unit) for unit in self.units if device in unit.devices)
        wanted = sum(self._share(unit) for unit in step.targets if device in unit.devices)
        return used + wanted <= self.bench.capacity[device]

    def _share(self, unit: EMU) -> int:
        return self.bench.sizes[unit.model_stage].bytes // unit.layout.size

    def _begin(self, component: Component, step: Primitive) -> None:
        if isinstance(step, Destroy):
            message = Message("bench.destroy", {"unit": step.sources[0]})
        else:
            fields = {"source": step.sources[0], "target": step.targets[0]}
            message = Message("bench.copy", fields | {"schema": self.bench.schemas[step.model_stage]})
        component.running = {self.bench.crew.submit(device, message) for device in sorted(step.devices)}

    def _hear(self) -> None:
        for ticket, reply in self.bench.crew.poll(POLL_S):
            if isinstance(reply, NereusError):
                raise reply
            for component in self.components:
                if ticket in component.running:
                    component.running.discard(ticket)
                    if not component.running:
                        self._end(component)

    def _end(self, component: Component) -> None:
        step = component.steps.pop(0)
        component.held.clear()
        if isinstance(step, Destroy):
            self.units.remove(step.sources[0])
        else:
            self.units.extend(step.targets)


def run(quick: bool = False) -> list[Result]:
    """All trials of each kind, ours and theirs in turn."""
    lines: list[Result] = []
    for kind in KINDS[:1] if quick else KINDS:
        bench = Bench(kind)
        try:
            trials = [drawn(kind, seed) for seed in range(2 if quick else TRIALS)]
            outcomes = [(bench.ours(trial), bench.local(trial)) for trial in trials]
        finally:
            bench.close()
        lines.append(_line(kind, [one for one, _ in outcomes], [other for _, other in outcomes]))
    return lines


def _line(kind: Kind, ours: Sequence[Outcome], local: Sequence[Outcome]) -> Result:
    rate, other = (100 * mean(outcome.succeeded for outcome in outcomes) for outcomes in (ours, local))
    deadlocks = sum(outcome.what.startswith("deadlock") for outcome in local)
    failed = [outcome.what for outcome in ours if not outcome.succeeded]
    notes = f"{len(ours)} trials each; theirs: {deadlocks} deadlocks" + (f"; ours: {failed[0]}" if failed else "")
    details = {"kind": kind.name, "devices": kind.devices, "deadlocks": deadlocks, "ours": [], "local": []}
    for name, outcomes in (("ours", ours), ("local", local)):
        done = [outcome.seconds for outcome in outcomes if outcome.succeeded]
        details[f"{name}_s"] = mean(done) if done else None
        details[name] = [(outcome.succeeded, outcome.seconds, outcome.what) for outcome in outcomes]
    details["edges"] = sorted({outcome.edges for outcome in ours})
    return at_least(f"{kind.name}: success, %", 100, rate, baseline=other, notes=notes, details=details)


def tables(lines: Sequence[Result]) -> list[Table]:
    """As the paper prints it."""
    head = ("Type", "Devices", "Local orders: succ., %", "time, s", "Ours: succ., %", "time, s", "Edges")
    table = Table(*head, title="Coordination under three kinds of overlap; times of the trials that succeeded")
    for line in lines:
        if "kind" in line.details:
            told = line.details
            theirs, ours = (f"{told[key]:.2f}" if told[key] is not None else "–" for key in ("local_s", "ours_s"))
            edges = "–".join(str(each) for each in sorted({told["edges"][0], told["edges"][-1]}))
            rates = (f"{line.baseline:.0f}", theirs, f"{line.measured:.0f}", ours)
            table.add_row(told["kind"], str(told["devices"]), *rates, edges)
    return [table]
