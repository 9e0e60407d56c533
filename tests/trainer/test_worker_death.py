"""A worker that dies ends the run: it is named, what is whole is kept, and nothing runs on."""

# ruff: noqa: ARG002
from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from nereus.clusters.local import Local
from nereus.controller.admission.never import Never
from nereus.controller.monitor import Thresholds
from nereus.core import (
    Boundary,
    Capabilities,
    ControllerState,
    Decision,
    ModelStage,
    Observation,
    Outcome,
    Pin,
    Trigger,
    WorkerLostError,
)
from nereus.cost.state import schemas
from nereus.trainer import checkpoint, run
from nereus.trainer.config import JobConfig
from tests.support.jobs import Trained, job_config, largest_difference, make_models, train
from tests.support.plans import plan_of
from tests.trainer.plans import ALONE
from tests.trainer.programs import DIES_IN_COMMIT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

STEPS = 2


class Watch:
    """A recorder that knows the worker processes, and kills the one of a device at the boundary of a step."""

    def __init__(self, kill_device: int | None = None, at_step: int = 1) -> None:
        self.pids: dict[str, int] = {}
        self._victim = f"nereus-device-{kill_device}"
        self._at_step = at_step

    def begin(self, state: ControllerState) -> None:
        self.pids = {child.name: child.pid or 0 for child in multiprocessing.active_children()}

    def record(
        self,
        boundary: Boundary,
        seen: Observation,
        triggers: Collection[Trigger],
        decision: Decision,
        outcome: Outcome | None,
    ) -> None:
        if boundary.step == self._at_step and self._victim in self.pids:
            os.kill(self.pids[self._victim], signal.SIGKILL)

    def metrics(self, step: int, values: object) -> None:
        pass


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def pinned(models: Path, **training: Pin) -> JobConfig:
    """The job with its trained models where a test wants them; all else on device 0."""
    pins = {ModelStage.parse(name): Pin(1, 1, 1, 2, (0,)) for name in ALONE}
    pins |= {ModelStage.parse(f"{model}/training"): pin for model, pin in training.items()}
    return replace(job_config(models, steps=STEPS), capabilities=Capabilities(pins=pins))


def run_train(config: JobConfig, run_dir: Path, watch: Watch, resume: Path | None = None) -> run.Finished:
    source = Local(2, "1 GiB", oversubscribe=True)
    return run.train(config, source, Never(), Thresholds(), [watch], run_dir, resume)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_nothing_is_left(watch: Watch, run_dir: Path) -> None:
    assert {"nereus-device-0", "nereus-device-1"} <= watch.pids.keys()
    deadline_s = time.monotonic() + 10
    while running := [name for name, pid in watch.pids.items() if alive(pid)]:
        assert time.monotonic() < deadline_s, f"still there: {running}"
        time.sleep(0.05)
    assert not list(run_dir.rglob("*.part"))


def test_killed_while_it_commits_the_run_ends_with_a_checkpoint_that_goes_on_as_if_nothing_had_been(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Pin(1, 1, 2, 2, (0, 1))
    config, watch = pinned(models, actor=both, critic=both), Watch()
    with monkeypatch.context() as patch:
        patch.setattr(run, "PROGRAM", DIES_IN_COMMIT)
        with pytest.raises(WorkerLostError, match=r"device 1 is lost: .*SIGKILL; checkpoint written to .*/step-0"):
            run_train(config, tmp_path / "run", watch)
    assert_nothing_is_left(watch, tmp_path / "run")
    saved = checkpoint.latest(tmp_path / "run")
    table = checkpoint.read_table(saved)
    assert table is not None
    assert table.updates["update_actor"] == 2, "the second update counts, though one replica never made it"

    finished = run_train(config, tmp_path / "run", Watch(), resume=tmp_path / "run")
    manifest = checkpoint.read_manifest(finished.checkpoint)
    assert (manifest.step, manifest.position) == (STEPS, STEPS * 12)
    known = schemas(config.algorithm.workflow(config.specs))
    resumed = Trained(
        parameters={
            str(ms): dict(checkpoint.parameters(finished.checkpoint, unit, known[ms]))
            for ms, unit in manifest.units.items()
        }
    )
    unbroken = train(config, [plan_of(ALONE)], tmp_path / "unbroken", 1)
    assert largest_difference(unbroken, resumed) <= 1e-11


def test_killed_between_steps_with_the_only_copy_of_a_model_the_loss_is_said_and_no_checkpoint_written(
    models: Path, tmp_path: Path
) -> None:
    config, watch = pinned(models, critic=Pin(1, 1, 1, 2, (1,))), Watch(kill_device=1)
    lost = r"device 1 is lost: .*SIGKILL; no checkpoint: no whole unit of critic/training is left"
    with pytest.raises(WorkerLostError, match=lost) as caught:
        run_train(config, tmp_path / "run", watch)
    assert caught.value.exit_code == 1
    assert_nothing_is_left(watch, tmp_path / "run")
    assert not list(tmp_path.rglob(checkpoint.MANIFEST))


def test_killed_between_steps_with_a_copy_elsewhere_a_checkpoint_is_written(models: Path, tmp_path: Path) -> None:
    both = Pin(1, 1, 2, 2, (0, 1))
    config, watch = pinned(models, actor=both, critic=both), Watch(kill_device=1)
    with pytest.raises(WorkerLostError, match=r"checkpoint written to .*/step-1"):
        run_train(config, tmp_path / "run", watch)
    assert_nothing_is_left(watch, tmp_path / "run")
    manifest = checkpoint.read_manifest(checkpoint.latest(tmp_path / "run"))
    assert (manifest.step, manifest.position) == (1, 12)
