"""Weight synchronisation on real processes: what people reported of it, and a new replica's learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nereus.algorithms.grpo import Grpo
from nereus.algorithms.ppo import Ppo
from nereus.core import Kind, LogicalState, ModelStage, TransitionError
from nereus.cost.state import schemas
from nereus.engine.connection import Message
from nereus.trainer.config import OptimizerConfig
from nereus.transition.compile import compile as compile_transition
from tests.support.jobs import TIMEOUT_S, ReplayedJob, job_config, make_models, running
from tests.support.plans import Degrees, plan_of
from tests.trainer.programs import FAILS_IN_SYNC, READER, SPOILS_SYNC, SYNC_WAITS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

ACTOR, ROLLOUT = ModelStage.parse("actor/training"), ModelStage.parse("actor/generation")
ONE_TO_MANY: dict[str, Degrees] = {
    "actor/generation": (1, 1, 3, (1, 2, 3)),
    "reference/inference": (1, 1, 1, (0,)),
    "reward/inference": (1, 1, 1, (0,)),
    "actor/training": (1, 1, 1, (0,)),
}

SHAPES: dict[str, tuple[int, ...]] = {"prompt_tokens": (3,), "prompt_lengths": (), "sample_ids": ()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def read(job: ReplayedJob) -> Mapping[int, Message]:
    return job.crew.call(sorted(job.units.devices), Message("read"), TIMEOUT_S)


def parameters(reply: Message, model_stage: ModelStage) -> dict[str, bytes]:
    found = {}
    for key, array in reply.arrays.items():
        name, kind = key.removeprefix(f"{model_stage} ").rsplit(" ", 1)
        if key.startswith(f"{model_stage} ") and kind == Kind.PARAM:
            found[name] = np.asarray(array).tobytes()
    return found


def test_every_receiver_has_the_senders_weights_and_says_of_which_update(models: Path, tmp_path: Path) -> None:
    """OpenRLHF#660: unsure whether weights arrive at all. Old ones never answer for new ones."""
    config = job_config(models, Grpo(), precision="fp32", steps=1)
    with running(config, plan_of(ONE_TO_MANY), tmp_path, 4, program=READER) as (job, _):
        before = parameters(read(job)[1], ROLLOUT)
        list(job.boundaries())
        replies = read(job)
        wanted = parameters(replies[0], ACTOR)
        assert wanted
        assert wanted != before
        for device in (1, 2, 3):
            assert parameters(replies[device], ROLLOUT) == wanted
            assert replies[device].fields["held"][ROLLOUT][1].policy_version == 2
        assert job.call_s["sync"] > 0
        fields = {"unit": job.units.of(ROLLOUT)[0], "greedy": False, "seed": None, "version": 3}
        arrays = {name: np.ones((1, *shape), np.int64) for name, shape in SHAPES.items()}
        with pytest.raises(TransitionError, match="has the weights of update 2, not of update 3"):
            job.crew.call((1,), Message("generate", fields, arrays), TIMEOUT_S)


def test_a_receiver_that_fails_ends_the_wait_of_its_sender_and_of_the_other_receivers(
    models: Path, tmp_path: Path
) -> None:
    """trl PR#6913, open-instruct PR#1454: the sender sat in a broadcast for ever."""
    config = job_config(models, Grpo(), precision="fp32", steps=1)
    with running(config, plan_of(ONE_TO_MANY), tmp_path, 4, program=FAILS_IN_SYNC) as (job, _):
        with pytest.raises(TransitionError, match="device 2: no room for what it passes on"):
            list(job.boundaries())
        held = {device: reply.fields["held"] for device, reply in read(job).items()}
        assert {held[device][ROLLOUT][1].policy_version for device in (1, 2, 3)} <= {0, 2}
        assert held[2][ROLLOUT][1].policy_version == 0, "weights count only when all have arrived"
        assert held[0][ACTOR][1].update_count == 2
        assert job.checkpoint().is_dir()


def test_a_device_that_takes_no_part_goes_on_with_other_work(tmp_path: Path) -> None:
    """The critic's last update, on a device of its own, and the synchronisation happen at the same time."""
    config = job_config(make_models(tmp_path / "models"), Ppo(), precision="fp32", steps=1)
    degrees = {**ONE_TO_MANY, "actor/generation": (1, 1, 1, (1,)), "critic/training": (1, 1, 1, (2,))}
    with running(config, plan_of(degrees), tmp_path, 3, program=SYNC_WAITS) as (job, _):
        list(job.boundaries())
        assert read(job)[1].fields["held"][ROLLOUT][1].policy_version == config.workload.updates


@pytest.mark.parametrize("receivers", [(1, 2, 3), (3,)], ids=["among replicas", "of the trained"])
def test_weights_that_arrived_wrong_are_named(receivers: tuple[int, ...], models: Path, tmp_path: Path) -> None:
    config = job_config(models, Grpo(), precision="bf16", steps=1)
    degrees = {**ONE_TO_MANY, "actor/generation": (1, 1, len(receivers), receivers)}
    with (
        running(config, plan_of(degrees), tmp_path, 4, program=SPOILS_SYNC) as (job, _),
        pytest.raises(TransitionError, match=r"(copies of actor/generation|another hash than in) .*norm"),
    ):
        list(job.boundaries())


def test_a_new_replica_joins_a_warm_up_at_the_rate_of_the_old_one(models: Path, tmp_path: Path) -> None:
    """O09, torchtitan#4598: a replica that joins at step 37 with a stale rate drifts away."""
    warm = OptimizerConfig(lr=3e-2, warmup_updates=50, total_updates=100)
    config = replace(job_config(models, Grpo(), steps=2), optimizers={"actor": warm})
    alone = plan_of({**ONE_TO_MANY, "actor/generation": (1, 1, 1, (1,))})
    both = plan_of({**ONE_TO_MANY, "actor/generation": (1, 1, 1, (1,)), "actor/training": (1, 1, 2, (0, 1))})
    with running(config, alone, tmp_path, 2, program=READER) as (job, executor):
        job.logical[ACTOR] = LogicalState(update_count=37)
        job.crew.call((0, 1), Message("unload"), TIMEOUT_S)
        job.load()
        boundaries = job.boundaries()
        next(boundaries)
        with job.paused():
            outcome = executor.execute(compile_transition(job.units, both, schemas(job.workflow)))
            job.adopt(outcome.units, both)
        next(boundaries)
        replies = read(job)
        assert {replies[device].fields["held"][ACTOR][1].update_count for device in (0, 1)} == {41}
        assert parameters(replies[0], ACTOR) == parameters(replies[1], ACTOR)
