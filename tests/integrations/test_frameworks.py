"""What each framework's configuration says, against values read off it by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nereus.integrations import Imported, read, read_text
from nereus.integrations.imported import MiniBatch, Part, Refusal, RefusedImportError
from nereus.integrations.stated import stated
from tests.integrations import texts


def some(part: Part | None, *names: str) -> tuple[Any, ...]:
    assert part is not None
    return tuple(getattr(part, name) for name in names)


def test_verl() -> None:
    found = read_text("verl", texts.VERL, "run.sh")
    assert (found.nodes, found.devices_per_node, found.devices, found.colocated) == (2, 8, 16, True)
    assert found.models == {"actor": "models/Qwen2.5-7B-Instruct"}
    assert found.roles == ("actor", "reference")
    assert some(found.actor, "backend", "tp", "pp", "micro_batch", "recompute") == ("megatron", 4, 2, 2, "full")
    assert some(found.reference, "tp", "pp") == (4, 2)
    assert some(found.rollout, "backend", "tp", "devices") == ("vllm", 2, 16)
    assert found.defaults["rollout.tp"] == "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    assert (found.batch.prompts, found.batch.samples_per_prompt, found.batch.mini_batch) == (256, 8, 64)
    assert found.batch.mini_batch_unit is MiniBatch.PROMPTS
    assert (found.batch.max_prompt_tokens, found.batch.max_response_tokens) == (1024, 3072)
    assert found.kv_share == 0.6


def test_verl_whose_generation_has_devices_of_its_own() -> None:
    text = """
actor_rollout_ref.model.path=Qwen/Qwen2.5-7B
data.train_batch_size=0
actor_rollout_ref.actor.ppo_mini_batch_size=32
actor_rollout_ref.actor.ulysses_sequence_parallel_size=2
actor_rollout_ref.actor.fsdp_config.param_offload=True
async_training.require_batches=4
trainer.nnodes=4
trainer.n_gpus_per_node=8
rollout.nnodes=12
rollout.n_gpus_per_node=8
"""
    found = read_text("verl", text, "run.txt")
    assert (found.devices, found.actor.devices, found.rollout.devices, found.colocated) == (128, 32, 96, False)
    assert found.asynchronous
    assert (found.batch.prompts, found.batch.stream_prompts) == (0, 128)
    assert some(found.actor, "backend", "sp", "zero", "param_offload", "recompute") == ("fsdp", 2, 3, True, "full")
    assert found.roles == ("actor", "critic")  # verl's default estimator is GAE
    assert found.defaults["algorithm"] == "algorithm.adv_estimator=gae"
    assert stated(found)["total_gpus"] == 32


def test_openrlhf_with_older_flags() -> None:
    found = read_text("openrlhf", texts.OPENRLHF, "train.sh")
    assert (found.devices, found.colocated) == (12, False)  # actor with reference, critic, engines
    assert found.roles == ("actor", "reference", "critic")
    assert some(found.actor, "devices", "zero", "micro_batch", "recompute", "optimizer_offload") == (
        4,
        3,
        4,
        "full",
        True,
    )
    assert some(found.rollout, "devices", "dp", "tp") == (4, 2, 2)
    assert (found.batch.prompts, found.batch.mini_batch, found.batch.mini_batch_unit) == (512, 128, MiniBatch.SAMPLES)
    assert found.defaults["kv_share"] == "--vllm.gpu_memory_utilization=0.95"


def test_nemo_rl() -> None:
    found = read_text("nemo-rl", texts.NEMO_RL, "grpo.yaml")
    assert (found.nodes, found.devices, found.actor.devices, found.rollout.devices) == (3, 24, 16, 8)
    assert found.colocated is False
    assert some(found.actor, "backend", "tp", "pp", "sequence_parallel", "recompute") == (
        "megatron",
        2,
        2,
        True,
        "full",
    )
    assert some(found.rollout, "tp", "pp") == (4, 1)
    assert (found.batch.prompts, found.batch.samples_per_prompt, found.batch.mini_batch) == (64, 32, 512)
    assert (found.batch.max_prompt_tokens, found.batch.max_response_tokens) == (1024, 4096)  # a reference resolved
    assert found.defaults["kl_penalty"] == "loss_fn.reference_policy_kl_penalty=0.01"


def test_nemo_rl_inherits_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(texts.NEMO_RL)
    (tmp_path / "recipes").mkdir()
    own = tmp_path / "recipes" / "own.yaml"
    own.write_text("defaults: ../base.yaml\npolicy: {megatron_cfg: {tensor_model_parallel_size: 8}}\n")
    found = read("nemo-rl", own)
    assert (found.actor.tp, found.actor.pp, found.batch.prompts) == (8, 2, 64)


def test_slime() -> None:
    found = read_text("slime", texts.SLIME, "run.sh")
    assert (found.nodes, found.devices, found.colocated) == (2, 16, True)
    assert some(found.actor, "tp", "pp", "cp", "ep", "last_stage_layers", "tokens") == (4, 2, 2, 8, 15, 8192)
    assert (found.actor.recompute, found.rollout.tp, found.rollout.devices) == ("full", 8, 16)
    assert (found.batch.prompts, found.batch.samples_per_prompt, found.batch.mini_batch) == (32, 8, 256)
    assert found.batch.packed
    assert found.roles == ("actor", "reference")
    assert found.models == {"actor": "/root/Qwen3-30B-A3B"}
    assert any("models/glm.sh" in note for note in found.notes)


def test_slime_without_samples_takes_the_fewest_that_its_own_check_accepts() -> None:
    text = texts.SLIME.replace("--n-samples-per-prompt 8", "")
    found = read_text("slime", text, "run.sh")
    assert found.batch.samples_per_prompt == 8  # 256 = 32 x 8
    assert any("--n-samples-per-prompt is missing" in note for note in found.notes)


def test_roll() -> None:
    found = read_text("roll", texts.ROLL, "rlvr.yaml")
    assert (found.nodes, found.devices, found.colocated) == (2, 16, True)
    assert some(found.actor, "devices", "tp", "pp", "micro_batch", "recompute") == (16, 2, 1, 1, "full")
    assert some(found.rollout, "devices", "tp", "backend") == (12, 2, "vllm")
    assert found.device_lists["reference"] == tuple(range(10))
    assert (found.batch.mini_batch, found.batch.mini_batch_unit) == (32, MiniBatch.ACCUMULATION)


def test_areal() -> None:
    found = read_text("areal", texts.AREAL, "areal.yaml")
    assert (found.devices, found.colocated, found.asynchronous) == (16, False, True)
    assert some(found.rollout, "backend", "dp", "tp", "devices") == ("sglang", 4, 2, 8)
    assert some(found.actor, "backend", "dp", "pp", "tp", "cp", "ep", "devices") == ("megatron", 1, 2, 2, 2, 4, 8)
    assert (found.batch.mini_batch, found.batch.mini_batch_unit) == (4, MiniBatch.UPDATES)
    assert found.kv_share == 0.8


@pytest.mark.parametrize("allocation", ["sglang:d4t2+d8", "sglang.d4t2+fsdp:d8", "sglang:d4p1t2+fsdp:d8p1t1"])
def test_areal_allocations_in_their_spellings(allocation: str) -> None:
    lines = [line for line in texts.AREAL.splitlines() if not line.startswith("allocation_mode")]
    found = read_text("areal", "\n".join([*lines, f"allocation_mode: {allocation}"]), "areal.yaml")
    assert some(found.rollout, "dp", "tp") == (4, 2)
    assert some(found.actor, "backend", "devices") == ("fsdp", 8)


@pytest.mark.parametrize(
    ("framework", "text", "name"),
    [
        ("verl", texts.VERL, "a.sh"),
        ("openrlhf", texts.OPENRLHF, "a.sh"),
        ("nemo-rl", texts.NEMO_RL, "a.yaml"),
        ("slime", texts.SLIME, "a.sh"),
        ("roll", texts.ROLL, "a.yaml"),
        ("areal", texts.AREAL, "a.yaml"),
    ],
)
def test_the_record_of_every_framework_has_the_same_columns(framework: str, text: str, name: str) -> None:
    found: Imported = read_text(framework, text, name)
    assert list(stated(found)) == list(stated(read_text("verl", texts.VERL, "a.sh")))
    assert stated(found)["framework"] == framework


def test_roll_runs_the_reference_where_something_asks_for_its_log_probabilities() -> None:
    """Its default is a KL coefficient of 0.2; `init_kl_coef: 0` alone turns the reference off."""
    assert "reference" in read_text("roll", texts.ROLL, "rlvr.yaml").roles
    off = texts.ROLL + "init_kl_coef: 0.0\n"
    assert "reference" not in read_text("roll", off, "rlvr.yaml").roles
    assert "reference" in read_text("roll", off + "use_kl_loss: true\n", "rlvr.yaml").roles


def test_roll_takes_the_defaults_of_its_own_classes() -> None:
    lines = texts.ROLL.replace("rollout_batch_size: 64\n", "").replace(", tensor_parallel_size: 2", "")
    found = read_text("roll", lines, "rlvr.yaml")
    assert (found.batch.prompts, found.rollout.tp) == (128, 1)
    assert found.defaults["batch.prompts"] == "rollout_batch_size=128"
    worker = lines + "roles: {actor_infer: {num_gpus_per_worker: 4}}\n"
    assert read_text("roll", worker, "rlvr.yaml").rollout.tp == 1
    assert read_text("roll", worker.replace("name: vllm", "name: sglang"), "rlvr.yaml").rollout.tp == 4


def test_openrlhf_places_roles_behind_each_other() -> None:
    """Actor with reference on 0-3, critic on 4-7, engines on 8-11: as its Ray actors ask for GPUs."""
    found = read_text("openrlhf", texts.OPENRLHF, "train.sh")
    assert found.device_lists == {
        "actor_train": (0, 1, 2, 3),
        "reference": (0, 1, 2, 3),
        "critic": (4, 5, 6, 7),
        "actor_infer": (8, 9, 10, 11),
    }
    alone = read_text("openrlhf", texts.OPENRLHF.replace("--colocate_actor_ref", ""), "train.sh")
    assert (alone.devices, alone.device_lists["reference"]) == (16, (4, 5, 6, 7))


def test_openrlhf_keeps_engines_apart_when_it_is_asynchronous() -> None:
    text = "python -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 4 --vllm.num_engines 4 --train.colocate_all "
    text += "--algo.advantage.estimator rloo --algo.kl.init_coef 0 "
    assert (read_text("openrlhf", text, "a.sh").devices, read_text("openrlhf", text, "a.sh").colocated) == (4, True)
    found = read_text("openrlhf", text + "--train.async_enable", "a.sh")
    assert (found.devices, found.colocated) == (8, False)
    assert stated(found)["placement"] == "colocated"  # what its flag says, of the models that train or infer


def test_openrlhf_of_both_ages_has_its_own_defaults() -> None:
    old = read_text("openrlhf", "python train.py --actor_num_nodes 1 --prompt_max_len 512 --pretrain x", "a.sh")
    new = read_text("openrlhf", "python train.py --actor.num_nodes 1 --actor.model_name_or_path x", "a.sh")
    assert (old.actor.micro_batch, new.actor.micro_batch) == (4, 1)
    bounds = [(f.batch.max_prompt_tokens, f.batch.max_response_tokens, f.batch.max_sequence_tokens) for f in (old, new)]
    assert bounds == [(512, 1024, None), (None, None, 2048)]


@pytest.mark.parametrize(
    ("more", "waits"),
    [
        ("", True),
        ("reward_model.rollout.free_cache_engine=False", False),
        ("reward_model.enable_resource_pool=True reward_model.nnodes=1 reward_model.n_gpus_per_node=4", False),
    ],
)
def test_verls_reward_engine_sleeps_where_it_shares_devices(more: str, waits: bool) -> None:
    text = texts.VERL.replace("$@\n", "reward_model.enable=True reward_model.use_reward_loop=True " + more)
    found = read_text("verl", text, "run.sh")
    assert found.reward is not None
    assert found.reward.param_offload is waits


def test_verl_whose_reward_model_has_devices_of_its_own() -> None:
    text = texts.VERL.replace("$@\n", "reward_model.enable=True reward_model.enable_resource_pool=True")
    found = read_text("verl", text + " reward_model.nnodes=1 reward_model.n_gpus_per_node=4", "run.sh")
    assert (found.devices, found.device_lists["reward"]) == (20, (16, 17, 18, 19))
    with pytest.raises(RefusedImportError, match="0 nodes of 4"):
        read_text("verl", text + " reward_model.n_gpus_per_node=4", "run.sh")


@pytest.mark.parametrize(
    ("framework", "text", "name"),
    [
        ("verl", "torchrun -m verl.trainer.fsdp_sft_trainer data.train_batch_size=8 trainer.nnodes=1", "sft.sh"),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_sft --pretrain x --train_batch_size 8", "sft.sh"),
        ("slime", "python train.py --debug-train-only --rollout-batch-size 8 --hf-checkpoint x", "sft.sh"),
        ("areal", "actor: {path: x, backend: 'fsdp:d8'}\ntrain_dataset: {batch_size: 8}", "sft.yaml"),
    ],
)
def test_what_generates_nothing_is_no_rl_step(framework: str, text: str, name: str) -> None:
    with pytest.raises(RefusedImportError, match="no RL step") as caught:
        read_text(framework, text, name)
    assert caught.value.reason is Refusal.NO_BATCH


def test_the_batch_system_sets_what_the_script_asks_it_for() -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=4   # four\n#SBATCH --gpus-per-node=h100:4\n" + texts.VERL.partition("\n")[2]
    text = text.replace("${NNODES:-2}", "$SLURM_JOB_NUM_NODES").replace(
        "n_gpus_per_node=8", "n_gpus_per_node=$SLURM_GPUS_PER_NODE"
    )
    assert read_text("verl", text, "run.slurm").devices == 16
    assert read_text("verl", text, "run.slurm", {"SLURM_JOB_NUM_NODES": "2"}).devices == 8


def test_flags_behind_a_missing_backslash_belong_to_the_command_before_them() -> None:
    whole = read_text("slime", texts.SLIME, "run.sh")
    found = read_text("slime", texts.SLIME.replace("--actor-num-nodes 2 \\", "--actor-num-nodes 2"), "run.sh")
    assert stated(found) == stated(whole)
    assert any("taken to end with" in note for note in found.notes)


@pytest.mark.parametrize(
    ("framework", "text", "name", "value"),
    [
        ("roll", texts.ROLL, "rlvr.yaml", "recompute_granularity: full"),
        ("slime", texts.SLIME, "run.sh", "--recompute-granularity full"),
        ("verl", texts.VERL, "run.sh", "recompute_granularity=full"),
    ],
)
def test_a_recomputation_that_megatron_does_not_have(framework: str, text: str, name: str, value: str) -> None:
    with pytest.raises(RefusedImportError, match=r"recompute.granularity is 'some', valid: none, selective, full"):
        read_text(framework, text.replace(value, value.replace("full", "some")), name)


def test_openrlhf_has_a_token_budget_where_it_packs_by_tokens() -> None:
    text = "python -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.model_name_or_path x"
    assert read_text("openrlhf", text, "a.sh").actor.tokens is None
    found = read_text("openrlhf", f"{text} --train.dynamic_batch_enable", "a.sh")
    assert (found.actor.tokens, found.batch.packed) == (16192, True)
    assert found.defaults["actor.tokens"] == "--train.max_tokens_per_gpu=16192"
