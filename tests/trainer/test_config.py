"""Learning rates and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.core import SettingsError
from nereus.families.models import named
from nereus.trainer.config import ModelSource, OptimizerConfig, SamplingConfig
from tests.trainer.world import config


def test_rate_is_constant_by_default() -> None:
    config = OptimizerConfig(lr=3e-4)
    assert [config.rate(update) for update in (0, 1, 1000)] == [3e-4] * 3


def test_rate_warms_up_by_optimizer_update() -> None:
    config = OptimizerConfig(lr=1.0, warmup_updates=4)
    assert [config.rate(update) for update in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_rate_goes_linearly_to_its_end_and_stays_there() -> None:
    config = OptimizerConfig(lr=1.0, lr_end=0.2, total_updates=8)
    assert [config.rate(update) for update in (0, 4, 8, 20)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_warm_up_scales_the_decayed_rate() -> None:
    config = OptimizerConfig(lr=1.0, lr_end=0.0, total_updates=10, warmup_updates=2)
    assert [config.rate(update) for update in range(3)] == pytest.approx([0.5, 0.9, 0.8])


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampling_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="need temperature > 0 and 0 < top_p <= 1"):
        SamplingConfig(**wrong)  # type: ignore[arg-type]


def test_a_family_that_is_planned_only_is_refused() -> None:
    made = config()
    models = dict(made.models) | {"actor": ModelSource("nowhere", named("Qwen3-30B-A3B"))}
    with pytest.raises(SettingsError, match=r"models.actor: qwen3_moe can be planned.*it runs llama, mistral, qwen2, "):
        replace(made, models=models)
