"""Is the chosen plan a good one? Every valid plan of a small paced GRPO job, measured, against the planner's choice.

    python -m benchmarks.plan_choice [--models build/tiny] [--json]

First the controller's way: run what the planner proposes, learn from the steps, propose again, until the proposal
stands. Then every valid plan (up to a renaming of the devices, which are all alike) runs a few steps on the same
samples, live transitions in between; the fastest ones run a second time, in turns, so that luck does not choose the
winner. Degrees, micro-batches and the reference's single replica are pinned so that the plans can all be run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, permutations, product
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from benchmarks._common import running
from nereus.algorithms.grpo import Grpo
from nereus.clusters.local import Local
from nereus.controller.admission.always import Always
from nereus.controller.brain import Brain
from nereus.core import (
    Assignment,
    Candidate,
    Capabilities,
    ControllerState,
    Layout,
    Lengths,
    ModelStage,
    Observation,
    Pin,
    Plan,
    Workload,
)
from nereus.core.model_dir import ModelDir
from nereus.cost.state import schemas
from nereus.cost.step import StepModel
from nereus.engine.executor import TransitionExecutor
from nereus.families.llama import Llama
from nereus.planning.judge import misfit
from nereus.planning.legal import legal_tp
from nereus.planning.problem import Problem
from nereus.tasks.counting import Counting
from nereus.trainer.config import JobConfig, ModelSource, OptimizerConfig, SamplingConfig
from nereus.trainer.job import RLJob
from nereus.trainer.table import SampleTable
from nereus.transition.budget import Budget
from nereus.transition.compile import compile as compile_transition

DEVICES, SPEED, CAPACITY = 4, 0.3, "64 MiB"
SEQUENCES, MAX_RESPONSE_TOKENS = 64, 56
TARGET = 0.15
LEARNING_STEPS, ROUNDS = 3, 5
"""Steps under each proposal before the next one, and how many proposals at most."""
SHORTLIST = 10
GENERATION, REFERENCE, TRAINING = map(ModelStage.parse, ("actor/generation", "reference/inference", "actor/training"))


class SameStep(RLJob):
    """A job whose every step is its first: the same samples and, as nothing is learned, the same responses."""

    def _new_table(self) -> SampleTable:
        self.position = 0
        table = super()._new_table()
        table.step = 0
        return table


@dataclass(slots=True)
class Measured:
    """One plan: what the calibrated model predicts and what its steps took."""

    plan: Plan
    predicted_s: float
    predicted_calls: dict[str, float]
    step_s: list[float] = field(default_factory=list)
    call_s: list[dict[str, float]] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)

    def call(self, name: str) -> float:
        """The median of one call."""
        return statistics.median(calls.get(name, 0.0) for calls in self.call_s)


def job_config(models: Path) -> JobConfig:
    """GRPO on the counting task with the verifier's reward; the learning rate is zero, so that all steps are alike."""
    path = models / "actor"
    source = ModelSource(str(path), Llama().spec(ModelDir.read(path).config))
    return JobConfig(
        algorithm=Grpo(reward_model=False),
        task=Counting(),
        models={"actor": source, "reference": source},
        workload=Workload(
            prompts=SEQUENCES // 8,
            samples_per_prompt=8,
            prompt=Lengths.constant(3),
            response=Lengths(6.0, 18.0, 30.0),
            mini_batch=SEQUENCES // 2,
            max_response_tokens=MAX_RESPONSE_TOKENS,
        ),
        optimizers={"actor": OptimizerConfig(lr=0.0)},
        sampling=SamplingConfig(max_response_tokens=MAX_RESPONSE_TOKENS),
        capabilities=Capabilities(
            tp=(1, 2),
            pp=(1, 2),
            recompute=("none",),
            pins={
                GENERATION: Pin(pp=1, dp=2, micro_batch=SEQUENCES // 2),
                REFERENCE: Pin(tp=1, pp=1, dp=1, micro_batch=16),
                TRAINING: Pin(micro_batch=8),
            },
        ),
        steps=sys.maxsize,
    )


def every_plan(problem: Problem) -> list[Plan]:
    """Every plan that fits, on every set of devices; of those that differ in the names of devices alone, the first."""
    choices = [list(_placed(problem, ms)) for ms in problem.workflow.model_stages]
    found: dict[object, Plan] = {}
    model = problem.model()
    for assignments in product(*choices):
        plan = Plan(assignments)
        if misfit(problem, model, plan) is None:
            found.setdefault(identity(plan), plan)
    return list(found.values())


def identity(plan: Plan) -> object:
    """Equal for plans that differ in the names of devices, or in the order of replicas and tp ranks, alone."""

    def under(names: dict[int, int]) -> Any:
        return tuple(
            (str(a.candidate), tuple(sorted(_positions(unit, a.candidate.layout.tp, names) for unit in a.units)))
            for a in sorted(plan.assignments, key=lambda a: a.candidate.model_stage.sort_key)
        )

    devices = sorted(plan.devices)
    return min(under(dict(zip(devices, order, strict=True))) for order in permutations(range(len(devices))))


def _positions(unit: Sequence[int], tp: int, names: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(names[d] for d in unit[start : start + tp])) for start in range(0, len(unit), tp))


def _placed(problem: Problem, model_stage: ModelStage) -> Iterator[Assignment]:
    pool, able, pin = problem.cluster.ids, problem.capabilities, problem.capabilities.pin(model_stage)
    for tp, pp, dp in product(legal_tp(problem, model_stage), able.pp, range(1, len(pool) + 1)):
        candidate = Candidate(model_stage, Layout(tp, pp), dp, pin.micro_batch or 1)
        asked = all(wanted in (None, given) for wanted, given in ((pin.tp, tp), (pin.pp, pp), (pin.dp, dp)))
        if not asked or candidate.devices > len(pool):
            continue
        size = candidate.layout.size
        for devices in combinations(pool, candidate.devices):
            units = tuple(devices[start : start + size] for start in range(0, len(devices), size))
            yield Assignment(candidate, units)


class Bench:
    """The running job, moved from plan to plan."""

    def __init__(self, job: RLJob, executor: TransitionExecutor) -> None:
        self.job = job
        self._executor = executor
        self._schemas = schemas(job.workflow)
        self._capacity = {d: job.source.cluster().kind(d).memory_bytes for d in job.source.cluster().ids}
        self._boundaries = job.boundaries()

    def move(self, plan: Plan) -> None:
        """A live transition to `plan`."""
        dag = compile_transition(self.job.units, plan, self._schemas, Budget(self._capacity))
        outcome = self._executor.execute(dag)
        if not outcome.completed:
            raise RuntimeError(f"the transition to {plan.describe()} failed: {outcome.error}")
        self.job.adopt(outcome.units, plan)

    def steps(self, count: int) -> Iterator[Observation]:
        """Run steps; the facts of each."""
        for boundary in islice(self._boundaries, count):
            yield self.job.observe(boundary)

    def measure(self, entry: Measured, count: int) -> None:
        """Move to a plan and time `count` steps, after one that is not counted."""
        self.move(entry.plan)
        for seen in islice(self.steps(count + 1), 1, None):
            entry.step_s.append(seen.step_s or 0.0)
            entry.call_s.append(dict(seen.call_s))


def calibrated(bench: Bench, brain: Brain, state: ControllerState) -> tuple[ControllerState, list[Plan]]:
    """Learn under what is proposed until nothing faster is; the state then, and every plan on the way."""
    visited = [state.plan]
    for _ in range(ROUNDS):
        for seen in bench.steps(LEARNING_STEPS):
            state, _ = brain.take_in(state, seen)
        options = brain.propose(state)
        best = min(options.proposals, key=lambda p: p.estimate.step_s, default=None)
        if best is None or (state.estimate is not None and state.estimate.step_s <= best.estimate.step_s):
            break
        bench.move(best.plan)
        state = replace(state, plan=best.plan, units=bench.job.units)
        visited.append(best.plan)
    return state, visited


def measure(models: Path) -> dict[str, Any]:
    """All figures."""
    config, source = job_config(models), Local(DEVICES, CAPACITY, SPEED)
    workflow = config.algorithm.workflow(config.specs)
    brain = Brain(workflow, config.capabilities, schemas(workflow), Always())
    state = brain.start(source.cluster(), config.workload)
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(config, source, state.plan, Path(folder), SameStep) as (job, executor),
    ):
        bench = Bench(job, executor)
        state, visited = calibrated(bench, brain, state)
        model = StepModel(workflow, state.workload, state.cluster, state.calibration)
        problem = Problem(workflow, state.workload, state.cluster, config.capabilities, state.calibration)
        plans = {identity(plan): plan for plan in every_plan(problem)} | {identity(state.plan): state.plan}
        entries = {
            key: Measured(plan, model.estimate(plan).step_s, dict(model.call_s(plan))) for key, plan in plans.items()
        }
        for entry in entries.values():
            bench.measure(entry, 2)
        chosen = entries[identity(state.plan)]
        finalists = sorted(entries.values(), key=lambda entry: entry.measured_s)[:SHORTLIST]
        rematch(bench, [*finalists, *([] if chosen in finalists else [chosen])])
    best = min((*finalists, chosen), key=lambda entry: entry.measured_s)
    correlation = spearmanr([e.predicted_s for e in entries.values()], [e.measured_s for e in entries.values()])
    return {
        "plans": len(entries),
        "seconds": time.monotonic() - began_s,
        "lengths": {"mean": state.workload.response.mean, "maximum": state.workload.response.maximum},
        "visited": [plan.describe() for plan in visited],
        "chosen": described(chosen),
        "best": described(best),
        "gap": chosen.measured_s / best.measured_s - 1.0,
        "rank_correlation": float(correlation.statistic),
        "all": [described(entry) for entry in sorted(entries.values(), key=lambda entry: entry.measured_s)],
    }


def rematch(bench: Bench, entries: Sequence[Measured]) -> None:
    """Measure again, in turns and in both directions, and forget the first measurement."""
    for entry in entries:
        entry.step_s, entry.call_s = [], []
    for order in (entries, entries[::-1]):
        for entry in order:
            bench.measure(entry, 2)


def described(entry: Measured) -> dict[str, Any]:
    """A plan with its times and those of its calls."""
    return {
        "plan": entry.plan.describe(),
        "predicted_s": entry.predicted_s,
        "measured_s": entry.measured_s,
        "steps_s": entry.step_s,
        "calls": {
            name: {"predicted_s": s, "measured_s": entry.call(name)} for name, s in entry.predicted_calls.items()
        },
    }


def report(found: dict[str, Any]) -> str:
    """The comparison as text."""
    chosen, best, lengths = found["chosen"], found["best"], found["lengths"]
    lines = [
        f"GRPO on {DEVICES} devices, each held to {SPEED} of a core; {SEQUENCES} sequences a step, "
        f"{lengths['mean']:.1f} response tokens on average, {lengths['maximum']:.0f} at most",
        f"{found['plans']} valid plans measured in {found['seconds']:.0f} s",
        "",
        f"  {'predicted':>9}  {'measured':>8}  the fastest ten",
    ]
    for entry in found["all"][:SHORTLIST]:
        mark = "*" if entry["plan"] == chosen["plan"] else " "
        lines.append(f"{mark} {entry['predicted_s']:>8.2f}s  {entry['measured_s']:>7.2f}s  {entry['plan']}")
    lines += ["", f"  {'call':<22}{'chosen: predicted':>18}{'measured':>10}{'best: predicted':>18}{'measured':>10}"]
    for name, one in chosen["calls"].items():
        other = best["calls"][name]
        lines.append(
            f"  {name:<22}{one['predicted_s']:>17.2f}s{one['measured_s']:>9.2f}s"
            f"{other['predicted_s']:>17.2f}s{other['measured_s']:>9.2f}s"
        )
    lines += [
        "",
        f"chosen after {len(found['visited'])} proposals: {chosen['plan']}: "
        f"predicted {chosen['predicted_s']:.2f} s, measured {chosen['measured_s']:.2f} s",
        f"best measured: {best['plan']}: {best['measured_s']:.2f} s",
        f"rank correlation of predicted and measured over all plans: {found['rank_correlation']:.2f}",
        f"gap {found['gap']:.1%}, target at most {TARGET:.0%}: " + ("met" if found["gap"] <= TARGET else "missed"),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("build/tiny"), help="what make_tiny_models.py built")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args(arguments)
    found = measure(options.models)
    print(json.dumps(found, indent=1) if options.json else report(found))


if __name__ == "__main__":
    main()
