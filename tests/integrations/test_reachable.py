"""An imported job is compared with plans that its framework can run: roles share devices as the file places them."""

from __future__ import annotations

import pytest

from nereus.core import ModelStage, Stage
from nereus.integrations import export, job, read_text
from nereus.planning.problem import Problem
from nereus.planning.search import SearchResult, search
from tests.integrations import texts

PPO = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae \\
    data.train_batch_size=64 data.max_prompt_length=64 data.max_response_length=128 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct critic.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 \\
    critic.ppo_micro_batch_size_per_gpu=2 algorithm.use_kl_in_reward=True \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2
"""
GENERATION = ModelStage("actor", Stage.GENERATION)


def built(framework: str, text: str, name: str = "run.sh") -> job.ImportedJob:
    found = read_text(framework, text, name)
    return job.build(found, job.pool(found, "h100x8"), job.specs(found))


def found(made: job.ImportedJob) -> SearchResult:
    return search(Problem(made.workflow, made.workload, made.cluster, made.capabilities), 8)


def test_every_plan_for_verl_has_one_pool_of_devices_and_can_be_exported() -> None:
    made = built("verl", PPO)
    assert made.capabilities.placement == "colocated"
    plans = [scored.plan for scored in found(made).best]
    assert len(plans) > 1
    for plan in plans:
        assert len({plan.of(ms).devices for ms in plan.model_stages}) == 1
        assert export.overrides("verl", plan, made.workflow, made.workload, made.cluster)


def test_generation_beside_training_stays_beside_it() -> None:
    made = built("nemo-rl", texts.NEMO_RL, "grpo.yaml")
    assert made.capabilities.placement == "disaggregated"
    for scored in found(made).best:
        plan = scored.plan
        others = {plan.of(ms).devices for ms in plan.model_stages if ms != GENERATION}
        assert len(others) == 1
        assert not plan.of(GENERATION).devices & next(iter(others))


@pytest.mark.parametrize(
    ("framework", "text", "words"),
    [
        ("verl", PPO, "all roles take turns on the same devices"),
        ("openrlhf", texts.OPENRLHF, "roles share devices or have their own"),
        ("openrlhf", f"{texts.OPENRLHF.rstrip()} --advantage_estimator rloo", "generation has devices of its own"),
    ],
)
def test_what_the_framework_limits_is_said(framework: str, text: str, words: str) -> None:
    (line,) = (line for line in built(framework, text).assumptions if "is looked at" in line)
    assert framework in line
    assert words in line
