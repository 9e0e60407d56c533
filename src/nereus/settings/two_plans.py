"""The two plans that `nereus diff` is given, and the job both are of: from files, or from the record of a run."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path

from nereus import settings as build
from nereus.core import (
    Adapt,
    Calibration,
    Candidate,
    Capabilities,
    Cluster,
    ModelSpec,
    Plan,
    SettingsError,
    Workflow,
    Workload,
    codec,
)
from nereus.core.plan import ranges
from nereus.core.sizes import show_bytes
from nereus.cost import calibrate
from nereus.cost.state import family_of
from nereus.planning.problem import Problem
from nereus.report import plan_json
from nereus.report.diff import Asked
from nereus.report.history import History, Tick
from nereus.report.recorders import jsonl

SETTINGS, CALIBRATION = "settings.yaml", "calibration.json"
"""Of a run, in its directory."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a plan is of, and `name` for where that stands."""

    name: str
    workflow: Workflow
    workload: Workload
    cluster: Cluster
    calibration: Calibration = field(default_factory=Calibration)


@dataclass(frozen=True, slots=True)
class _Read:
    """A plan and, where its file says it, its job."""

    name: str
    plan: Plan
    job: Job | None


def of_files(
    before: Path, after: Path, job: Path | None, overrides: Sequence[str], lost: Collection[int] = ()
) -> Asked:
    """Two plan files. The job is what they say, or `job`, or the run that a file lies in. Raises SettingsError."""
    read = (_read(before), _read(after))
    told = [_of_job_file(job, overrides)] if job is not None else []
    jobs = [each.job for each in read if each.job is not None] + told
    if not jobs:
        jobs = [_of_run(run) for run in dict.fromkeys(map(_run_of, (before, after))) if run is not None]
    if not jobs:
        raise SettingsError(f"{before} and {after} hold plans alone: say what job they are of with --job JOB.yaml")
    for one, other in pairwise(jobs):
        _same_job(one, other)
    # The newest facts are the goal's.
    last = read[1].job or jobs[-1]
    pools = (read[0].job or jobs[0], last)
    return _asked(read, pools, lost)


def of_run(run: Path, steps: tuple[int, int], lost: Collection[int] = ()) -> Asked:
    """The plans under which two steps of a run ran, both priced for what the second had to handle.

    Raises SettingsError for what is not a run or not its steps.
    """
    job, ticks = _of_run(run), _ticks(run)
    by_step = {tick.entry.boundary.step: tick for tick in ticks}
    for step in steps:
        if step not in by_step:
            raise SettingsError(f"--steps: {run} has no step {step}; it recorded steps {ranges(by_step) or 'none'}")
    first, second = steps
    seen = by_step[second].entry.seen
    prompt, response = seen.prompt or job.workload.prompt, seen.response or job.workload.response
    job = replace(job, workload=replace(job.workload, prompt=prompt, response=response))
    read = tuple(_Read(f"step {step}", by_step[step].plan, job) for step in steps)
    asked = _asked((read[0], read[1]), (job, job), lost)
    made = [tick.entry for tick in ticks if first <= tick.entry.boundary.step < second and tick.entry.outcome]
    if len(made) != 1:
        note = (f"the run changed its plan {len(made)} times between these steps; this is the direct way",)
        return replace(asked, notes=note if made else ())
    decision = made[0].decision
    plan = decision.proposal.plan if isinstance(decision, Adapt) else None
    return replace(asked, outcome=made[0].outcome if plan == asked.after else None)


def _read(path: Path) -> _Read:
    """A plan as `nereus plan --json` prints it or as a run records it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except IsADirectoryError:
        raise SettingsError(
            f"{path} is a directory; of a run, say which steps: nereus diff {path} --steps FROM TO"
        ) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: not JSON: {error}") from None
    if isinstance(data, dict) and data.get("type") == "Plan":
        try:
            return _Read(str(path), codec.decode(Plan, data), None)
        except SettingsError as error:
            raise SettingsError(f"{path}: not a plan: {error}") from None
    saved = plan_json.read(path)
    return _Read(str(path), saved.plan, Job(str(path), saved.workflow, saved.workload, saved.cluster))


def _of_job_file(path: Path, overrides: Sequence[str]) -> Job:
    """The job of a YAML file, on its whole pool."""
    settings = build.resolve(path, overrides)
    pool = build.cluster_source(settings).cluster()
    problem = build.problem(settings, len(pool.ids))
    return Job(str(path), problem.workflow, problem.workload, pool)


def _run_of(plan: Path) -> Path | None:
    """The run directory that a plan file lies in."""
    run = plan.resolve().parent.parent
    return run if plan.resolve().parent.name == jsonl.PLANS and (run / jsonl.DECISIONS).is_file() else None


def _of_run(run: Path) -> Job:
    """The job of a run: its settings, its pool and first lengths, and what it learnt of costs."""
    if not (run / SETTINGS).is_file():
        raise SettingsError(f"{run}: not a run: there is no {SETTINGS} in it")
    parts = jsonl.read(run)
    if not parts:
        raise SettingsError(f"{run}: {jsonl.DECISIONS} is empty: the run ended before its first step")
    state = parts[0].state
    learnt, path = state.calibration, run / CALIBRATION
    if path.is_file():
        try:
            learnt = calibrate.load(path)
        except OSError as error:
            raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    workflow = build.workflow(build.resolve(run / SETTINGS))
    return Job(str(run), workflow, state.workload, state.pool, learnt)


def _ticks(run: Path) -> list[Tick]:
    """What the run recorded, each tick with the plan its step ran under."""
    ticks: list[Tick] = []
    for part in jsonl.read(run):
        past = History()
        past.begin(part.state)
        for entry in part.entries:
            past.record(entry.boundary, entry.seen, entry.triggers, entry.decision, entry.outcome)
        ticks += past.ticks
    return ticks


def _same_job(one: Job, other: Job) -> None:
    """Raise SettingsError naming the first thing in which two jobs differ."""
    where = f"{one.name} and {other.name} are of different jobs"
    stages = [{str(ms) for ms in job.workflow.model_stages} for job in (one, other)]
    if stages[0] != stages[1]:
        only = {"first": stages[0] - stages[1], "second": stages[1] - stages[0]}
        told = (f"only the {which} has {', '.join(sorted(names))}" for which, names in only.items() if names)
        raise SettingsError(f"{where}: {'; '.join(told)}")
    for model, spec in one.workflow.specs.items():
        theirs = other.workflow.specs[model]
        for size in fields(ModelSpec):
            mine, its = getattr(spec, size.name), getattr(theirs, size.name)
            if mine != its:
                raise SettingsError(f"{where}: {size.name} of the {model} is {mine} in the first, {its} in the second")
    for ms in one.workflow.model_stages:
        if one.workflow.updated(ms) != other.workflow.updated(ms):
            raise SettingsError(f"{where}: only one of them updates {ms}")


def _asked(read: tuple[_Read, _Read], jobs: tuple[Job, Job], lost: Collection[int]) -> Asked:
    """The two plans on the devices of both pools, checked."""
    cluster = _both(jobs)
    here = frozenset(cluster.ids)
    if unknown := sorted(set(lost) - here):
        raise SettingsError(f"--lost: there is no device {ranges(unknown)}, there are {ranges(here)}")
    gone = frozenset(lost)
    for each, job in zip(read, jobs, strict=True):
        _check(each, job)
    if used := sorted(read[1].plan.devices & gone):
        raise SettingsError(f"{read[1].name}: the plan uses devices {ranges(used)}, which are lost")
    last = jobs[1]
    problem = Problem(last.workflow, last.workload, cluster, Capabilities(), last.calibration)
    notes: tuple[str, ...] = ()
    if jobs[0].workload != jobs[1].workload:
        notes = (f"steps of both plans are predicted for the lengths and batch of {read[1].name}",)
    return Asked((read[0].name, read[1].name), read[0].plan, read[1].plan, problem, gone, notes)


def _both(jobs: tuple[Job, Job]) -> Cluster:
    """The devices of both pools. Raises SettingsError where one device is two different things."""
    first, second = (job.cluster for job in jobs)
    if first == second:
        return first
    known = {device.id: device for device in second.devices}
    for device in first.devices:
        its = known.setdefault(device.id, device)
        sides = (
            (first.kinds[device.kind], device.node),
            (second.kinds.get(its.kind, first.kinds[device.kind]), its.node),
        )
        mine, theirs = ((each.name, each.memory_bytes, node) for each, node in sides)
        if mine != theirs:
            there = [f"{name} of {show_bytes(size)} on node {node}" for name, size, node in (mine, theirs)]
            raise SettingsError(
                f"{jobs[0].name} and {jobs[1].name} are on different machines: device {device.id} is {there[0]} in the "
                f"first, {there[1]} in the second"
            )
    everything = tuple(known[device] for device in sorted(known))
    return Cluster(everything, {**first.kinds, **second.kinds}, second.links)


def _check(read: _Read, job: Job) -> None:
    """Raise SettingsError unless the job has the plan's model-stages and devices and can have its layouts."""
    plan, workflow = read.plan, job.workflow
    planned, wanted = set(plan.model_stages), set(workflow.model_stages)
    for words, differing in (("has no layout for", wanted - planned), ("is not of this job: it has", planned - wanted)):
        if differing:
            raise SettingsError(f"{read.name}: the plan {words} {', '.join(sorted(map(str, differing)))} ({job.name})")
    if unknown := sorted(plan.devices - set(job.cluster.ids)):
        there = ranges(job.cluster.ids)
        raise SettingsError(
            f"{read.name}: the plan uses devices {ranges(unknown)}, which do not exist; there are {there}"
        )
    for assignment in plan.assignments:
        candidate = assignment.candidate
        if fault := _fault(candidate, workflow.spec(candidate.model_stage)):
            raise SettingsError(f"{read.name}: {candidate.model_stage} has {fault}")


def _fault(candidate: Candidate, spec: ModelSpec) -> str | None:
    """What of a candidate the model's family forbids, or a transition cannot move."""
    layout, valid = candidate.layout, family_of(spec).legal_tp(spec)
    if layout.tp not in valid:
        return (
            f"tp {layout.tp}, but {spec.family} with {spec.heads} heads and {spec.kv_heads} KV heads can be cut "
            f"{', '.join(map(str, valid))} ways"
        )
    if layout.pp > spec.layers:
        return f"pp {layout.pp}, but the model has {spec.layers} layers: valid PP 1 to {spec.layers}"
    if layout.stage_layers is not None and (sum(layout.stage_layers) != spec.layers or min(layout.stage_layers) < 1):
        return f"stage_layers {list(layout.stage_layers)}: each at least 1, {spec.layers} together"
    for name, neutral in (("cp", 1), ("ep", 1), ("vpp", 1), ("zero", 0), ("offload", False)):
        value = getattr(candidate, name)
        if value != neutral:
            return f"{name} {value}: a transition moves whole replicas of tp and pp, valid: {neutral}"
    return None
