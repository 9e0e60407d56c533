"""The plan does not change the training (D5.7): other static plans, and live transitions, give the same run."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.algorithms.ppo import Ppo
from tests.support.jobs import Degrees, job_config, largest_difference, make_models, plan_of, train

pytestmark = pytest.mark.processes

ALONE: dict[str, Degrees] = {
    "actor/generation": (1, 1, 1, (0,)),
    "reference/inference": (1, 1, 1, (0,)),
    "reward/inference": (1, 1, 1, (0,)),
    "actor/training": (1, 1, 1, (0,)),
    "critic/training": (1, 1, 1, (0,)),
}
SPREAD: dict[str, Degrees] = {
    "actor/generation": (2, 1, 2, (0, 1, 2, 3)),
    "reference/inference": (1, 2, 1, (0, 1)),
    "reward/inference": (2, 1, 1, (2, 3)),
    "actor/training": (2, 2, 1, (0, 1, 2, 3)),
    "critic/training": (1, 1, 3, (1, 2, 3)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def test_ppo_is_the_same_under_another_static_plan(models: Path, tmp_path: Path) -> None:
    config = job_config(models, Ppo())
    alone = train(config, [plan_of(ALONE)], tmp_path / "alone", 1)
    spread = train(config, [plan_of(SPREAD)], tmp_path / "spread", 4)
    assert spread.sample_ids == alone.sample_ids
    assert spread.responses == alone.responses
    assert largest_difference(alone, spread) <= 1e-11
