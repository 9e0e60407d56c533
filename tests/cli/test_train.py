"""`nereus train` on real processes: what a run leaves behind, Ctrl-C and going on elsewhere, a killed worker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereus.cli._app import import_extra
from nereus.cli.train import fresh
from nereus.settings import resolve
from tests.settings.files import job

COMMAND = [sys.executable, "-c", "from nereus.cli import main; main()"]
DEADLINE_S = 100


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the command keeps its temporary files and sockets. Not below tmp_path: socket names must be short."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))  # stays from run to run
        yield Path(folder)


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


def workers(coordinator: int) -> list[int]:
    """Process ids of the workers: what the fork server, the coordinator's child, has forked."""

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    family = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if in_session(pid, coordinator)]
    return [pid for pid in family if pid != coordinator and parent(pid) not in (coordinator, os.getpid())]


def in_session(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return False


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
def test_ctrl_c_ends_with_a_checkpoint_that_a_smaller_pool_goes_on_from(tmp_path: Path, scratch: Path) -> None:
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
    assert not list(scratch.iterdir())
    assert not list(run.rglob("*.part"))
    assert resolve(run / "settings.yaml") == resolve(path, ["run.steps=200"])
    for name in ("decisions.jsonl", "metrics.jsonl", "trace.json", "plans/step-0.json", "actor/config.json"):
        assert (run / name).exists(), name
    done = len((run / "metrics.jsonl").read_text().splitlines())

    more, devices = f"run.steps={done + 1}", "cluster.devices=2"
    resumed = start(
        tmp_path, "train", "--resume", run, "--run-dir", "on", "--json", "--verify", "--set", more, "--set", devices
    )
    out, err = finish(resumed)
    assert resumed.returncode == 0, err
    data = json.loads(out)
    assert (data["step"], data["stopped"]) == (done + 1, False)
    (metrics,) = map(json.loads, (tmp_path / "on" / "metrics.jsonl").read_text().splitlines())
    assert metrics["step"] == done + 1
    assert metrics["nereus/devices"] <= 2
    assert (tmp_path / "on" / f"trace-from-{done}.json").exists()
    assert not left_running(resumed.pid)

    before = (run / "settings.yaml").read_text()
    out, err = finish(idle := start(tmp_path, "train", "--resume", run, "--set", "run.steps=1"))
    assert (idle.returncode, out) == (2, "")
    assert f"is at step {done}, run.steps is 1" in err
    assert (run / "settings.yaml").read_text() == before
    assert not list(scratch.iterdir())


@pytest.mark.processes
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the workers through /proc")
def test_a_killed_worker_ends_the_run_with_its_name_and_nothing_left(tmp_path: Path, scratch: Path) -> None:
    run = tmp_path / "runs" / "job"
    process = start(tmp_path, "train", job(tmp_path), "--set", "run.steps=200", "--set", "cluster.devices=2")
    try:
        wait_for_steps(run, 1, process)
        os.kill(workers(process.pid)[0], signal.SIGKILL)
    finally:
        _, err = finish(process)
    said = " ".join(err.split())
    assert process.returncode == 1, err
    assert re.search(r"worker of device \d is lost: process \d+ was ended by SIGKILL", said)
    written = re.search(r"checkpoint written to (\S+)", said)
    assert written or "no checkpoint: no whole unit of" in said
    assert "Traceback" not in err
    assert not left_running(process.pid)
    assert not list(scratch.iterdir())
    assert not list(run.rglob("*.part"))


def test_a_second_run_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    first = tmp_path / "job"
    assert fresh(first) == first
    for directory in (first, tmp_path / "job-2"):
        directory.mkdir()
        (directory / "settings.yaml").write_text("")
    assert fresh(first) == tmp_path / "job-3"


def test_other_import_errors_are_not_called_a_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_extra("nereus.trainer.nothing_of_that_name")
