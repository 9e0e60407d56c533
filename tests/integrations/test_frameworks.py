"""What each framework's configuration says, against values read off it by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nereus.integrations import Imported, read, read_text
from nereus.integrations.imported import MiniBatch, Part
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
