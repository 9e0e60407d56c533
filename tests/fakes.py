"""Fakes, not mocks: a job, an executor and a brain that do what a test scripted, and note what they were asked."""

# ruff: noqa: ARG002
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from nereus.core import (
    Adapt,
    Assignment,
    Boundary,
    Candidate,
    Cluster,
    ControllerState,
    Decision,
    Device,
    DeviceKind,
    EMUSet,
    Estimate,
    Layout,
    Lengths,
    Link,
    ModelStage,
    Observation,
    Options,
    Outcome,
    Payback,
    Plan,
    Proposal,
    Stage,
    TransitionDAG,
    TransitionEstimate,
    Trigger,
    Workload,
    expand,
)

TRAINING = ModelStage("actor", Stage.TRAINING)
GENERATION = ModelStage("actor", Stage.GENERATION)
MIB = 2**20


def cluster(devices: int, memory_bytes: int = 64 * MIB, speed: float = 1.0) -> Cluster:
    """`devices` equal devices on one node."""
    kind = DeviceKind("cpu", memory_bytes, {"fp32": 5e10, "fp64": 2.5e10}, 4e9, 1.5e-5, speed)
    link = Link(1.5e9, 1e-4)
    return Cluster(
        tuple(Device(index, 0, "cpu") for index in range(devices)), {"cpu": kind}, {"intra": link, "inter": link}
    )


def plan(*devices: int, tp: int = 1, pp: int = 1, micro_batch: int = 1) -> Plan:
    """actor/training with the given degrees on these devices."""
    size = tp * pp
    units = tuple(devices[index : index + size] for index in range(0, len(devices), size))
    return Plan((Assignment(Candidate(TRAINING, Layout(tp, pp), len(units), micro_batch), units),))


def workload(mean: float = 10.0) -> Workload:
    """Sixteen sequences of about `mean` response tokens."""
    return Workload(16, 1, Lengths.constant(8), lengths(mean), 8, 64)


def lengths(mean: float, longest: float | None = None) -> Lengths:
    """A spread around `mean`."""
    top = longest or 1.5 * mean
    return Lengths(mean, 0.95 * top, top)


def state(now: Plan, devices: int = 4, **fields: object) -> ControllerState:
    """A state under `now` on a pool of `devices`."""
    pool = cluster(devices)
    values: dict[str, object] = {
        "plan": now,
        "units": expand(now),
        "pool": pool,
        "cluster": pool,
        "workload": workload(),
    }
    return ControllerState(**(values | fields))  # type: ignore[arg-type]


def estimate(step_s: float, peaks: Mapping[int, int] | None = None) -> Estimate:
    """A prediction of `step_s` seconds."""
    return Estimate(step_s, {"update_actor": step_s}, dict(peaks or {}), ("update_actor",), 0.1)


def proposal(now: Plan, target: Plan, step_s: float, saving_s: float, transition_s: float) -> Proposal:
    """A change from `now` to `target` without primitives."""
    dag = TransitionDAG(expand(now), expand(target))
    cost = TransitionEstimate(transition_s, {}, {}, 0, 0, 0)
    return Proposal(target, expand(target), dag, estimate(step_s), cost, saving_s)


def adapt(target: Proposal, urgent: bool = False) -> Adapt:
    """A decision for `target`."""
    payback = Payback(target.transition.seconds, target.saving_s, 4.0, 0.5)
    return Adapt(target, urgent, payback, "actor/training tp1 pp1 dp2 → tp2 pp1 dp1")


def seen(step: int, devices: Sequence[int], elapsed_s: float | None = None, **facts: object) -> Observation:
    """What a boundary shows; a step takes a second unless `facts` say otherwise."""
    boundary = Boundary(step, float(step) if elapsed_s is None else elapsed_s)
    values: dict[str, object] = {"step_s": 1.0}
    return Observation(boundary, frozenset(devices), **(values | facts))  # type: ignore[arg-type]


@dataclass
class ScriptedJob:
    """Yields the boundaries of its observations; `log` is shared with the executor, so that order shows."""

    observations: Sequence[Observation]
    log: list[str] = field(default_factory=list)
    adopted: list[tuple[EMUSet, Plan | None]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=lambda: {"response_length/mean": 10.0})

    def boundaries(self) -> Iterator[Boundary]:
        for observation in self.observations:
            yield observation.boundary

    def observe(self, boundary: Boundary) -> Observation:
        return next(each for each in self.observations if each.boundary == boundary)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.log.append("pause")
        yield
        self.log.append("resume")

    def adopt(self, units: EMUSet, plan: Plan | None = None) -> None:
        self.log.append("adopt")
        self.adopted.append((units, plan))

    def restart(self, plan: Plan) -> EMUSet:
        self.log.append("restart")
        return expand(plan)


@dataclass
class ScriptedExecutor:
    """Reaches every goal in `seconds`, or leaves `stopped` when that is given."""

    log: list[str] = field(default_factory=list)
    seconds: float = 0.5
    stopped: EMUSet | None = None

    def execute(self, dag: TransitionDAG) -> Outcome:
        self.log.append("execute")
        if self.stopped is not None:
            return Outcome(self.stopped, False, self.seconds, error="a peer is gone")
        return Outcome(dag.goal, True, self.seconds)


@dataclass
class ScriptedBrain:
    """Decides what the test queued: an empty queue means no trigger."""

    decisions: list[Decision] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def take_in(self, state: ControllerState, seen: Observation) -> tuple[ControllerState, tuple[Trigger, ...]]:
        self.log.append("take_in")
        triggers = (Trigger("length", False, "scripted"),) if self.decisions else ()
        return replace(state, last=seen), triggers

    def propose(self, state: ControllerState) -> Options:
        self.log.append("propose")
        return Options()

    def decide(self, state: ControllerState, triggers: Sequence[Trigger], options: Options) -> Decision:
        self.log.append("decide")
        return self.decisions.pop(0)

    def rebase(self, state: ControllerState, triggers: Sequence[Trigger]) -> ControllerState:
        self.log.append("rebase")
        return state

    def settle(self, state: ControllerState, decision: Adapt, outcome: Outcome) -> ControllerState:
        self.log.append("settle")
        return state

    def begin(self, state: ControllerState, plan: Plan, units: EMUSet) -> ControllerState:
        self.log.append("begin")
        return state


@dataclass
class Notebook:
    """A recorder that keeps what it is told."""

    began: list[ControllerState] = field(default_factory=list)
    ticks: list[tuple[Boundary, Decision, Outcome | None]] = field(default_factory=list)
    values: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def begin(self, state: ControllerState) -> None:
        self.began.append(state)

    def record(
        self,
        boundary: Boundary,
        seen: Observation,
        triggers: Collection[Trigger],
        decision: Decision,
        outcome: Outcome | None,
    ) -> None:
        self.ticks.append((boundary, decision, outcome))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.values.append((step, dict(values)))
