"""How a run begins and ends: what a resumed one refuses, what a failed one leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nereus.clusters.local import Local
from nereus.controller.admission.payback import Payback
from nereus.controller.monitor import Thresholds
from nereus.core import Head, OutOfMemoryError, SettingsError
from nereus.trainer import checkpoint, run
from nereus.trainer.config import ModelSource
from tests.support.jobs import job_config, make_models
from tests.support.jobs import train as train_under
from tests.support.plans import plan_of
from tests.trainer.plans import ALONE
from tests.trainer.world import config


def test_a_run_is_not_resumed_under_another_seed(tmp_path: Path) -> None:
    final = tmp_path / "old" / "checkpoints" / "step-1"
    with checkpoint.writing(final) as temporary:
        checkpoint.complete(temporary, final, checkpoint.Manifest(1, 14, {}, {}, seed=5), None)
    source = Local(1, "1 GiB", oversubscribe=True)
    with pytest.raises(SettingsError, match=r"run\.seed is 11, .* was made with 5"):
        run.train(config(seed=11), source, Payback(), Thresholds(), [], tmp_path / "new", tmp_path / "old")
    assert not (tmp_path / "new").exists()


def test_a_run_that_fails_keeps_a_checkpoint(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    error = OutOfMemoryError(1, 80, 40, 100, "activations")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(run, "control", fail)
    job: Any = SimpleNamespace(checkpoint=lambda: Path("run/checkpoints/step-3"))
    nothing: Any = None
    with pytest.raises(OutOfMemoryError, match="device 1"):
        run._controlled(job, nothing, nothing, [], nothing)
    assert "step-3" in caplog.text


@pytest.mark.processes
def test_a_critic_may_start_from_a_language_model(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", layers=2)
    made = job_config(models, steps=1)
    spec = replace(made.models["actor"].spec, head=Head.SCALAR)
    critic = ModelSource(made.models["actor"].path, spec)
    found = train_under(replace(made, models={**made.models, "critic": critic}), [plan_of(ALONE)], tmp_path / "run", 1)
    assert found.parameters["critic/training"]["score.weight"].abs().sum() > 0
