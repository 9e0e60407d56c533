"""One run of the built-in job from start to end: processes, controller loop, checkpoints, a clean stop."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nereus.controller.brain import Brain
from nereus.controller.loop import run as control
from nereus.controller.monitor import Thresholds
from nereus.core import (
    Boundary,
    Calibration,
    Cluster,
    ControllerState,
    NereusError,
    SettingsError,
    WorkerLostError,
    Workflow,
)
from nereus.core.ports import AdmissionRule, ClusterSource, Recorder
from nereus.cost import calibrate
from nereus.cost.state import family_of, schemas
from nereus.engine.crew import Crew
from nereus.engine.executor import TransitionExecutor
from nereus.engine.worker import DeviceSettings
from nereus.trainer import checkpoint
from nereus.trainer.config import JobConfig
from nereus.trainer.decoder import hf
from nereus.trainer.job import RLJob
from nereus.trainer.program import PROGRAM, Options

log = logging.getLogger(__name__)

CALIBRATION = "calibration.json"


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run ended. `stopped`: before its last step, because somebody asked."""

    step: int
    elapsed_s: float
    checkpoint: Path
    exported: Path | None
    stopped: bool


def train(
    config: JobConfig,
    source: ClusterSource,
    rule: AdmissionRule,
    thresholds: Thresholds,
    recorders: Sequence[Recorder],
    run_dir: Path,
    resume: Path | None = None,
    verify: bool = False,
) -> Finished:
    """Train under the controller until the last step, Ctrl-C or an error; no process is left in any case.

    `resume` is the directory of an earlier run; its newest checkpoint is loaded into whatever plan suits this pool.
    `verify` compares the hash of every logical tensor before and after each transition, and of every parameter with
    the trained one after each weight synchronisation.
    Raises InfeasibleError when nothing fits, WorkerLostError when a worker dies (after a checkpoint if the state is
    whole).
    """
    workflow = config.algorithm.workflow(config.specs)
    stored = checkpoint.latest(resume) if resume is not None else None
    if stored is not None:
        checkpoint.check(stored, schemas(workflow), config.seed)
    cluster = source.cluster()
    brain = Brain(workflow, config.capabilities, schemas(workflow), rule, thresholds)
    begin = source.available(Boundary(0, 0.0))
    learnt = _calibration(resume) if resume is not None else Calibration()
    state = brain.start(cluster, config.workload, begin, calibration=learnt)
    run_dir.mkdir(parents=True, exist_ok=True)
    with _crew(config, workflow, cluster) as crew:
        crew.start(begin)
        crew.wait_ready(begin, config.timeout_s)
        job = RLJob(config, workflow, crew, source, state.plan, run_dir, verify)
        executor = TransitionExecutor(crew, schemas(workflow), config.timeout_s, verify)
        with _stopping(job):
            job.load(stored)
            state = _controlled(job, executor, brain, recorders, state)
        path = job.checkpoint()
        calibrate.save(state.calibration, run_dir / CALIBRATION)
        exported = _export(config, path, run_dir)
        return Finished(job.step, job.elapsed_s, path, exported, job.step < config.steps)


def _controlled(
    job: RLJob, executor: TransitionExecutor, brain: Brain, recorders: Sequence[Recorder], state: ControllerState
) -> ControllerState:
    """The loop; when it fails, a checkpoint of what is whole before the error goes on."""
    try:
        return control(job, executor, brain, recorders, state)
    except NereusError as error:
        try:
            ending = f"checkpoint written to {job.checkpoint()}"
        except NereusError as failed:
            ending = f"no checkpoint: {failed}"
        if isinstance(error, WorkerLostError):
            raise WorkerLostError(error.device, f"{error.reason}; {ending}") from error
        log.error("the run failed; %s", ending)
        raise


def _crew(config: JobConfig, workflow: Workflow, cluster: Cluster) -> Crew:
    devices = {
        device: DeviceSettings(
            cluster.kind(device).memory_bytes, cluster.kind(device).speed, read_memory=config.read_memory
        )
        for device in cluster.ids
    }
    node_of = {device.id: device.node for device in cluster.devices}
    return Crew(devices, PROGRAM, Options(config, workflow, schemas(workflow), node_of), timeout_s=config.timeout_s)


@contextmanager
def _stopping(job: RLJob) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the job after the step under way, a second one at once."""

    def stop(number: int, _: FrameType | None) -> None:
        if job.stopping:
            raise KeyboardInterrupt
        log.warning("%s: ending after this step, with a checkpoint", signal.Signals(number).name)
        job.stopping = True

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _export(config: JobConfig, path: Path, run_dir: Path) -> Path | None:
    """The trained actor as a Hugging Face directory."""
    manifest = checkpoint.read_manifest(path)
    for model_stage, unit in manifest.units.items():
        if model_stage.model != "actor":
            continue
        spec = config.specs["actor"]
        found = schemas(config.algorithm.workflow(config.specs))[model_stage]
        target = run_dir / "actor"
        shutil.rmtree(target, ignore_errors=True)  # a resumed run replaces what it wrote before
        hf.write(target, family_of(spec).config(spec), checkpoint.parameters(path, unit, found))
        _copy_tokenizer(Path(config.models["actor"].path), target)
        return target
    return None


def _copy_tokenizer(source: Path, target: Path) -> None:
    """What a model directory holds beside its config and weights."""
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin") or file.name.endswith(".index.json")
        if file.is_file() and not weights and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def _calibration(run: Path) -> Calibration:
    with suppress(FileNotFoundError, SettingsError):
        return calibrate.load(run / CALIBRATION)
    return Calibration()
