"""`nereus train` on real processes: what a run leaves behind, Ctrl-C, and going on from it on a smaller pool."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nereus.cli import fresh, import_trainer
from nereus.settings import resolve
from tests.settings.files import job

COMMAND = [sys.executable, "-c", "from nereus.cli import main; main()"]
DEADLINE_S = 100


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """The command in a session of its own, so that what it leaves running can be found."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed; whatever happens, nothing of it runs on."""
    try:
        return process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def left_running(session: int) -> bool:
    """Whether a process of a session is still alive a moment after its leader ended."""
    for _ in range(50):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True


def wait_for_steps(run: Path, steps: int, process: subprocess.Popen[str]) -> None:
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= steps:
            return
        time.sleep(0.1)
    raise AssertionError(f"{steps} steps were not reached")


@pytest.mark.processes
@pytest.mark.timeout(3 * DEADLINE_S)
def test_ctrl_c_ends_with_a_checkpoint_that_a_smaller_pool_goes_on_from(tmp_path: Path) -> None:
    path, run = job(tmp_path), tmp_path / "runs" / "job"
    process = start(tmp_path, "train", path, "--set", "run.steps=200")
    try:
        wait_for_steps(run, 2, process)
        os.kill(process.pid, signal.SIGINT)
    finally:
        out, err = finish(process)
    assert process.returncode == 0, err
    assert f"resume with: nereus train --resume {run.relative_to(tmp_path)}" in out
    assert "Traceback" not in err
    assert not left_running(process.pid)
    assert resolve(run / "settings.yaml") == resolve(path, ["run.steps=200"])
    for name in ("decisions.jsonl", "metrics.jsonl", "trace.json", "plans/step-0.json", "actor/config.json"):
        assert (run / name).exists(), name
    done = len((run / "metrics.jsonl").read_text().splitlines())

    more, devices = f"run.steps={done + 1}", "cluster.devices=2"
    resumed = start(tmp_path, "train", "--resume", run, "--run-dir", "on", "--json", "--set", more, "--set", devices)
    out, err = finish(resumed)
    assert resumed.returncode == 0, err
    data = json.loads(out)
    assert (data["step"], data["stopped"]) == (done + 1, False)
    (metrics,) = map(json.loads, (tmp_path / "on" / "metrics.jsonl").read_text().splitlines())
    assert metrics["step"] == done + 1
    assert metrics["nereus/devices"] <= 2
    assert not left_running(resumed.pid)


def test_a_second_run_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    first = tmp_path / "job"
    assert fresh(first) == first
    for directory in (first, tmp_path / "job-2"):
        directory.mkdir()
        (directory / "settings.yaml").write_text("")
    assert fresh(first) == tmp_path / "job-3"


def test_other_import_errors_are_not_called_a_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_trainer("nereus.trainer.nothing_of_that_name")
