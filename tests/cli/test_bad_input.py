"""Bad input: the right exit code, one message on stderr, no traceback, nothing written, nothing started."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from nereus.core import Head
from tests.cli.command import Answer, Command
from tests.settings.files import job, model_dir


def refused(answer: Answer, code: int, *words: str) -> None:
    """One message on stderr and nothing else."""
    assert answer.code == code, answer
    assert answer.out == ""
    assert answer.err.count("nereus: ") == 1
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err.replace("\n", " "), answer.err


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("verb", ["check", "plan", "train"])
@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("workload.mini_bach=4", 2, ["workload.mini_bach", "did you mean 'workload.mini_batch'"]),
        ("plan.pin.actor/training.tp=3", 2, ["4 heads", "1, 2, 4"]),
        ("plan.pin.actor/training.pp=9", 2, ["4 layers"]),
        ("workload.mini_batch=5", 2, ["mini_batch 5 does not divide the batch of 16"]),
        ("cluster.speed=1", 2, ["4 devices x speed 1 = 4 cores", "oversubscribe"]),
        ("cluster.capacity=100 KiB", 3, ["device", "bytes"]),
    ],
)
def test_settings_are_refused(
    nereus: Command, tmp_path: Path, verb: str, override: str, code: int, words: list[str]
) -> None:
    path = job(tmp_path)
    before = files(tmp_path)
    refused(nereus(verb, path, "--set", override, "--set", "cluster.cores=1"), code, *words)
    assert files(tmp_path) == before
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("verb", ["check", "plan", "train"])
def test_model_directories_are_refused_from_their_headers(nereus: Command, tmp_path: Path, verb: str) -> None:
    model_dir(tmp_path / "actor", drop="model.norm.weight")
    refused(nereus(verb, job(tmp_path)), 2, "tensor model.norm.weight is missing")
    model_dir(tmp_path / "other", head=Head.SCALAR, shapes={"score.weight": [2, 64]})
    (tmp_path / "actor").rename(tmp_path / "broken")
    path = job(tmp_path, models={"actor": "actor", "reward": "other", "critic": "critic"})
    refused(nereus(verb, path), 2, "tensor score.weight has shape [2, 64]")


def test_a_trace_that_asks_for_zero_devices_is_refused(nereus: Command, tmp_path: Path) -> None:
    (tmp_path / "pool.csv").write_text("step,devices\n0,2\n5,0\n")
    pool = {"devices": 3, "capacity": "64 MiB", "speed": 0.3}
    path = job(tmp_path, cluster={"use": "trace", "path": "pool.csv", "pool": pool})
    refused(nereus("train", path), 2, "pool.csv:3: zero devices")


def test_an_incomplete_resume_directory_is_refused(nereus: Command, tmp_path: Path) -> None:
    path, run = job(tmp_path), tmp_path / "run"
    refused(nereus("train", "--resume", run), 2, "settings.yaml: cannot be read")
    (run / "checkpoints" / "step-4").mkdir(parents=True)
    before = files(tmp_path)
    refused(nereus("train", path, "--resume", run), 2, "no complete checkpoint")
    assert files(tmp_path) == before


def test_a_run_is_never_written_over(nereus: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.yaml").write_text("")
    refused(nereus("train", job(tmp_path), "--run-dir", run), 2, "already holds a run", "--resume")


def test_a_run_directory_that_cannot_be_made_is_refused(nereus: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(nereus("train", job(tmp_path), "--run-dir", str(tmp_path / "file" / "run")), 2, "run directory", "file/run")


def test_train_without_a_job_says_what_it_needs(nereus: Command) -> None:
    refused(nereus("train"), 2, "JOB file, or --resume")


def test_training_without_torch_names_the_remedy_and_planning_needs_none(tmp_path: Path) -> None:
    path = job(tmp_path)
    code = "import sys; sys.modules['torch'] = None; from nereus.cli import main; main()"
    for verb, expected in (("check", 0), ("plan", 0), ("train", 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, verb, str(path)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == expected, done.stderr
        if verb == "train":
            assert "pip install '.[train]'" in done.stderr
    assert not (tmp_path / "runs").exists()
