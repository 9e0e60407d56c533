"""The plan does not change the training (D5.7): other static plans, and live transitions, give the same run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nereus.algorithms.grpo import Grpo
from nereus.algorithms.ppo import Ppo
from nereus.algorithms.remax import Remax
from nereus.core import Plan
from nereus.core.ports import Algorithm
from tests.support.jobs import Trained, job_config, largest_difference, make_models, train
from tests.support.plans import Degrees, plan_of
from tests.trainer.plans import ALONE, SPREAD

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

CHANGES: tuple[dict[str, Degrees], ...] = (
    ALONE,
    SPREAD,  # growth to four devices
    {**SPREAD, "actor/training": (4, 1, 1, (0, 1, 2, 3)), "critic/training": (1, 2, 2, (0, 1, 2, 3))},
    {**SPREAD, "actor/training": (1, 2, 2, (3, 2, 1, 0)), "actor/generation": (1, 4, 1, (0, 1, 2, 3))},
    {
        "actor/generation": (1, 1, 2, (1, 2)),
        "reference/inference": (1, 1, 1, (1,)),
        "reward/inference": (1, 2, 1, (1, 2)),
        "actor/training": (1, 2, 1, (1, 2)),
        "critic/training": (2, 1, 1, (1, 2)),
    },  # shrink to two
    {**SPREAD, "actor/training": (1, 1, 4, (0, 1, 2, 3)), "critic/training": (2, 2, 1, (3, 2, 1, 0))},
)
STEPS = 6
FP64_LIMIT = 1e-11
FP32_LIMIT = 2e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def _plans(algorithm: Algorithm, changes: tuple[dict[str, Degrees], ...]) -> list[Plan]:
    """The plans without the model-stages that the algorithm lacks."""
    return [
        plan_of({name: degrees for name, degrees in plan.items() if name.partition("/")[0] in algorithm.models()})
        for plan in changes
    ]


def _run(models: Path, algorithm: Algorithm, changes: tuple[dict[str, Degrees], ...], run_dir: Path) -> Trained:
    config = job_config(models, algorithm, steps=STEPS)
    return train(config, _plans(algorithm, changes), run_dir, 1 if changes == (ALONE,) else 4)


@pytest.mark.parametrize("algorithm", [Ppo(), Grpo()], ids=["ppo", "grpo"])
def test_sampled_run_in_fp64_is_the_same_under_any_plan(algorithm: Algorithm, models: Path, tmp_path: Path) -> None:
    alone = _run(models, algorithm, (ALONE,), tmp_path / "alone")
    for name, changes in (("static", (SPREAD,)), ("moved", CHANGES)):
        other = _run(models, algorithm, changes, tmp_path / name)
        assert other.sample_ids == alone.sample_ids
        assert other.responses == alone.responses
        assert largest_difference(alone, other) <= FP64_LIMIT
    assert other.primitives == {"Split", "Merge", "Extend", "Destroy"}
    assert [i for step in alone.sample_ids for i in step] == list(range(STEPS * 12))


def test_replayed_run_in_fp32_is_the_same_under_any_plan(models: Path, tmp_path: Path) -> None:
    config = job_config(models, Ppo(), precision="fp32", steps=STEPS)
    alone = train(config, [plan_of(ALONE)], tmp_path / "alone", 1)
    moved = train(config, [plan_of(degrees) for degrees in CHANGES], tmp_path / "moved", 4, alone.responses)
    assert largest_difference(alone, moved) <= FP32_LIMIT


def test_remax_and_token_budget_run_the_same_under_another_plan(models: Path, tmp_path: Path) -> None:
    config = job_config(models, Remax(), steps=2)
    plans = _plans(Remax(), (ALONE, SPREAD))
    alone = train(config, plans[:1], tmp_path / "alone", 1)
    spread = train(replace(config, micro_batch_tokens=20), plans[1:], tmp_path / "spread", 4)
    assert spread.responses == alone.responses
    assert largest_difference(alone, spread) <= FP64_LIMIT
