"""What interrupts a run does not change it: a resume elsewhere, memory that runs out, a transition that stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nereus.core import (
    InfeasibleError,
    ModelStage,
    Observation,
    OutOfMemoryError,
    Plan,
    TransitionDAG,
    WorkerLostError,
)
from nereus.cost.state import schemas
from nereus.engine.executor import TransitionExecutor
from nereus.trainer import checkpoint
from nereus.trainer.checkpoint import shard_name
from nereus.transition.compile import compile as compile_transition
from tests.support.jobs import CAPACITY_BYTES, ReplayedJob, job_config, make_models, running
from tests.support.plans import Degrees, plan_of
from tests.trainer.plans import ALONE, PAIR, SPREAD
from tests.trainer.programs import BUSY_CRITIC, DIES_IN_TRANSITION, FAILS_IN_TRANSITION

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

ACTOR = ModelStage.parse("actor/training")
LIMIT = 1e-11
STEPS, SEQUENCES = 4, 12
WIDE: dict[str, Degrees] = {**PAIR, "actor/training": (1, 1, 2, (0, 1)), "critic/training": (1, 1, 1, (2,))}
WIDER: dict[str, Degrees] = {**WIDE, "actor/training": (2, 1, 2, (0, 1, 2, 3))}


@dataclass
class Run:
    """What a run did, and the logical state it ended with: (kind, name) → tensor by model-stage."""

    steps: list[int] = field(default_factory=list)
    sample_ids: list[int] = field(default_factory=list)
    responses: list[list[int]] = field(default_factory=list)
    events: list[Observation] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)
    state: Mapping[ModelStage, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    manifest: checkpoint.Manifest | None = None


def drive(
    job: ReplayedJob,
    executor: TransitionExecutor,
    plans: Mapping[int, Plan] | None = None,
    relief: Plan | None = None,
    restart: bool = False,
) -> Run:
    """Run to the end. `plans` are changed to after their step, `relief` when memory runs out.

    Units do not move, but for a `restart` from a checkpoint.
    """
    run = Run()
    for boundary in job.boundaries():
        seen = job.observe(boundary)
        run.steps.append(boundary.step)
        goal = (plans or {}).get(boundary.step)
        if seen.out_of_memory is not None:
            run.events.append(seen)
            goal = relief
        else:
            note(run, job, seen)
        if goal is not None and restart:
            job.restart(goal)
        elif goal is not None:
            with job.paused():
                outcome = executor.execute(TransitionDAG(job.units, job.units))
                job.adopt(outcome.units, goal)
    return run


def note(run: Run, job: ReplayedJob, seen: Observation) -> None:
    assert job.table is not None
    run.sample_ids += job.table.sample_ids.tolist()
    run.responses += job.table.tokens("response", job.table.sample_ids - job.table.sample_ids[0])
    run.peaks = {device: max(peak, run.peaks.get(device, 0)) for device, peak in seen.peaks.items()}


def settle(run: Run, path: Path) -> Run:
    """Read what a run ended with from its last checkpoint, written by units of one device."""
    run.manifest = checkpoint.read_manifest(path)
    run.state = {ms: load_file(path / shard_name(ms, 0, 0)) for ms in run.manifest.units}
    return run


def assert_same(run: Run, other: Run) -> None:
    """Identical samples, identical responses, every kind of state within the limit, equal counters."""
    assert run.sample_ids == other.sample_ids == list(range(STEPS * SEQUENCES))
    assert run.responses == other.responses
    assert run.manifest is not None
    assert other.manifest is not None
    assert run.manifest.logical == other.manifest.logical
    assert (run.manifest.step, run.manifest.position) == (STEPS, STEPS * SEQUENCES)
    for ms, tensors in other.state.items():
        for name, wanted in tensors.items():
            difference = (run.state[ms][name] - wanted).norm() / wanted.norm()
            assert difference <= LIMIT, f"{ms} {name}: {difference:.1e}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def unbroken(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps on one device with the smallest micro-batches."""
    config = job_config(models, steps=STEPS)
    with running(config, plan_of(ALONE, 1), tmp_path_factory.mktemp("unbroken"), 1) as (job, executor):
        return settle(drive(job, executor), job.checkpoint())


def test_a_run_resumed_under_another_plan_on_another_pool_is_the_same_run(
    models: Path, tmp_path: Path, unbroken: Run
) -> None:
    config = job_config(models, steps=STEPS)
    with running(replace(config, steps=2), plan_of(SPREAD), tmp_path / "first", 4) as (job, executor):
        run = drive(job, executor)
        path = job.checkpoint()
    with running(config, plan_of(PAIR), tmp_path / "second", 2, resume=path) as (job, executor):
        rest = drive(job, executor)
        settle(run, job.checkpoint())
    run.sample_ids += rest.sample_ids
    run.responses += rest.responses
    assert rest.steps == [3, 4]
    assert_same(run, unbroken)


def test_a_step_that_runs_out_of_memory_ends_under_smaller_micro_batches_as_if_nothing_had_been(
    models: Path, tmp_path: Path, unbroken: Run
) -> None:
    capacity = unbroken.peaks[0] * 21 // 20
    config = job_config(models, steps=STEPS)
    small, large = plan_of(ALONE, 1), plan_of(ALONE, 6)
    with running(config, small, tmp_path, 1, capacity) as (job, executor):
        run = settle(drive(job, executor, {1: large, 2: large}, small), job.checkpoint())
    assert run.steps == [1, 1, 2, 2, 3, 4], "each event has the boundary of the step before"
    assert [seen.boundary.step for seen in run.events] == [1, 2]
    for seen in run.events:
        assert f"of {capacity:,} are in use" in str(seen.out_of_memory)
        assert seen.step_s is None
    assert_same(run, unbroken)


def test_running_out_of_memory_ends_the_run_when_nothing_is_adopted(
    models: Path, tmp_path: Path, unbroken: Run
) -> None:
    config, capacity = job_config(models), unbroken.peaks[0] * 21 // 20
    with (
        running(config, plan_of(ALONE, 6), tmp_path, 1, capacity) as (job, executor),
        pytest.raises(OutOfMemoryError, match="device 0: activations needs"),
    ):
        drive(job, executor)


@pytest.mark.parametrize("restart", [False, True], ids=["adopt", "restart"])
def test_an_event_in_one_update_while_another_commits_applies_nothing_twice(
    restart: bool, models: Path, tmp_path: Path, unbroken: Run
) -> None:
    config = job_config(models, steps=STEPS)
    with running(config, plan_of(PAIR, 3), tmp_path, 2, program=BUSY_CRITIC) as (job, executor):
        relief = plan_of({**PAIR, "actor/training": (1, 1, 2, (0, 1))} if restart else PAIR, 1)
        run = settle(drive(job, executor, relief=relief, restart=restart), job.checkpoint())
    assert run.steps == [0, 1, 2, 3, 4]
    assert_same(run, unbroken)


def test_after_a_transition_that_stopped_the_run_goes_on_and_reaches_the_goal_later(
    models: Path, tmp_path: Path, unbroken: Run
) -> None:
    config, goal = job_config(models, steps=STEPS), plan_of(WIDER)
    with running(config, plan_of(WIDE), tmp_path, 4, program=FAILS_IN_TRANSITION) as (job, executor):
        run, known, completed = Run(), schemas(job.workflow), []
        for boundary in job.boundaries():
            note(run, job, job.observe(boundary))
            if boundary.step > 2:
                continue
            with job.paused():
                outcome = executor.execute(compile_transition(job.units, goal, known))
                job.adopt(outcome.units, goal if outcome.completed else None)
            completed.append(outcome.completed)
            assert {unit.layout for unit in outcome.units.of(ACTOR)} == {job.plan.of(ACTOR).candidate.layout}
        assert completed == [False, True]
        assert job.plan == goal
        back = plan_of(WIDE)
        with job.paused():
            outcome = executor.execute(compile_transition(job.units, back, known))
            job.adopt(outcome.units, back)
        assert_same(settle(run, job.checkpoint()), unbroken)


def test_a_worker_killed_in_a_transition_ends_the_run_with_a_checkpoint_of_what_is_whole(
    models: Path, tmp_path: Path
) -> None:
    config, goal = job_config(models, steps=1), plan_of(WIDER)
    with running(config, plan_of(WIDE), tmp_path, 4, program=DIES_IN_TRANSITION) as (job, executor):
        next(job.boundaries())
        with job.paused():
            outcome = executor.execute(compile_transition(job.units, goal, schemas(job.workflow)))
            assert not outcome.completed
            with pytest.raises(WorkerLostError, match=r"device 3 is lost: process \d+ was ended by SIGKILL"):
                job.adopt(outcome.units)
        manifest = checkpoint.read_manifest(job.checkpoint())
    assert set(manifest.units) == {ACTOR, ModelStage.parse("critic/training")}
    assert {state.update_count for ms, state in manifest.logical.items() if ms in manifest.units} == {2}


def test_a_target_that_does_not_fit_leaves_the_job_as_it_was(models: Path, tmp_path: Path) -> None:
    """The executor refuses before anything moves, and the next step runs on the units that were there."""
    config = job_config(models, steps=2)
    start = plan_of({**ALONE, "critic/training": (1, 1, 1, (1,))})
    with running(config, start, tmp_path, 2, CAPACITY_BYTES) as (job, executor):
        boundaries = job.boundaries()
        next(boundaries)
        dag = compile_transition(job.units, plan_of(ALONE), schemas(job.workflow))
        executor.check(dag)
        before = job.units
        impossible = replace(dag, primitives=tuple(replace(p, acquires={0: 1 << 40}) for p in dag.primitives))
        with pytest.raises(InfeasibleError):
            executor.check(impossible)
        with job.paused():
            outcome = executor.execute(impossible)
            job.adopt(outcome.units)
        assert (job.units, job.plan) == (before, start)
        assert next(boundaries).step == 2
