"""A run that is told to end before its first step: nothing is left, as when it ends later."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cli.test_train import DEADLINE_S, finish, left_running, scratch, start, workers
from tests.settings.files import job

__all__ = ["scratch"]


@pytest.mark.processes
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the workers through /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_workers_start_leaves_nothing(tmp_path: Path, scratch: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "train", job(tmp_path), "--set", "run.steps=200")
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not workers(process.pid) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, number)
    finally:
        _, err = finish(process)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert not left_running(process.pid)
    assert not list(scratch.iterdir())
