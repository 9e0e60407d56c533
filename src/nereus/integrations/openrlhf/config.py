"""OpenRLHF's flags, the dotted ones of today and the older ones with underscores. Defaults:
openrlhf/cli/train_ppo_ray.py (commit 3c3be62).
"""

from __future__ import annotations

from typing import Any

from nereus.integrations._keys import Keys
from nereus.integrations._tables import Table, degree, fill, part, size, switch
from nereus.integrations.imported import Batch, Imported, MiniBatch, Part, Refusal, RefusedImportError

ROOTS = (
    *("--actor", "--ref", "--critic", "--reward", "--vllm", "--train", "--rollout", "--ds", "--data", "--algo"),
    *("--actor_num_nodes", "--actor_num_gpus_per_node", "--ref_num_nodes", "--ref_num_gpus_per_node"),
    *("--vllm_num_engines", "--vllm_tensor_parallel_size", "--train_batch_size", "--rollout_batch_size", "--pretrain"),
    *("--micro_train_batch_size", "--colocate_all_models", "--zero_stage", "--n_samples_per_prompt"),
)

TRAINING: Table = {
    "tp": degree("--ds.tensor_parallel_size", "--ds_tensor_parallel_size"),
    "sp": degree("--ds.ring_attn_size", "--ring_attn_size"),
    "zero": degree("--ds.zero_stage", "--zero_stage", default=2),
    "micro_batch": size("--train.micro_batch_size", "--micro_train_batch_size", default=1),
    "tokens": size("--train.max_tokens_per_gpu", "--train_max_tokens_per_gpu"),
    "optimizer_offload": switch("--ds.adam_offload", "--adam_offload"),
}
SCORING: Table = {field: TRAINING[field] for field in ("tp", "sp", "zero")} | {
    "micro_batch": size("--rollout.micro_batch_size", "--micro_rollout_batch_size", default=1),
    "tokens": size("--rollout.max_tokens_per_gpu", "--rollout_max_tokens_per_gpu"),
}
"""Reference and reward: sharded as the actor is."""
ENGINE: Table = {
    "tp": degree("--vllm.tensor_parallel_size", "--vllm_tensor_parallel_size", default=1),
}
BATCH: Table = {
    "prompts": degree("--rollout.batch_size", "--rollout_batch_size", default=1024),
    "samples_per_prompt": degree("--rollout.n_samples_per_prompt", "--n_samples_per_prompt", default=1),
    "mini_batch": degree("--train.batch_size", "--train_batch_size", default=128),
    "epochs": degree("--train.max_epochs", "--max_epochs", default=1),
    "max_prompt_tokens": degree("--data.prompt_max_len", "--prompt_max_len"),
    "max_response_tokens": degree("--rollout.max_new_tokens", "--generate_max_len"),
    "max_sequence_tokens": degree("--data.max_len", "--max_len", default=2048),
    "unpadded": switch("--ds.packing_samples", "--packing_samples", default=False),
    "packed": switch("--train.dynamic_batch_enable", "--use_dynamic_batch", default=False),
}


def imported(keys: Keys) -> Imported:
    """What an OpenRLHF command line says."""
    nodes, per_node, training = _pool(keys, "actor")
    engines = keys.integer("--vllm.num_engines", "--vllm_num_engines", of="rollout.dp")
    everything = keys.flag("--train.colocate_all", "--colocate_all_models", default=False)
    engine = fill(keys, ENGINE, "rollout")
    generating = (engines or 0) * int(engine["tp"])
    algorithm = keys.text("--algo.advantage.estimator", "--advantage_estimator", default="gae", of="algorithm")
    roles = _roles(keys, algorithm)
    apart = not everything and bool(engines)
    checkpointing = keys.flag("--actor.gradient_checkpointing_enable", "--gradient_checkpointing")
    trained: dict[str, Any] = {"backend": "deepspeed", "recompute": "full" if checkpointing else "none"}
    return Imported(
        framework="openrlhf",
        algorithm=algorithm,
        models=_models(keys),
        roles=roles,
        nodes=nodes,
        devices_per_node=per_node,
        devices=training + _others(keys, roles) + (generating if apart else 0),
        colocated=not apart,
        actor=part(keys, TRAINING, "actor", **trained, devices=training),
        rollout=Part(backend="vllm", devices=generating or training, dp=engines, **engine),
        batch=_batch(keys),
        reference=_scoring(keys, "reference", "ref") if "reference" in roles else None,
        critic=part(keys, TRAINING, "critic", **trained, devices=_pool(keys, "critic")[2])
        if "critic" in roles
        else None,
        reward=_scoring(keys, "reward", "reward") if "reward" in roles else None,
        kv_share=keys.number(
            "--vllm.gpu_memory_utilization", "--vllm_gpu_memory_utilization", default=0.95, of="kv_share"
        ),
        asynchronous=bool(keys.flag("--train.async_enable", "--async_train")),
        idle_offload=bool(keys.flag("--ds.enable_sleep", "--deepspeed_enable_sleep")),
        notes=("mini_batch counts samples; rollout.dp is the number of vLLM engines; sp is ring attention",),
    )


def _batch(keys: Keys) -> Batch:
    values = fill(keys, BATCH, "batch")
    ring = keys.integer(*TRAINING["sp"].keys, default=1, needed=False) or 1
    # Both turn packing on by themselves.
    values["unpadded"] = values["unpadded"] or values["packed"] or ring > 1
    return Batch(mini_batch_unit=MiniBatch.SAMPLES, **values)


def _scoring(keys: Keys, of: str, role: str) -> Part:
    offload = keys.flag(f"--{role}.offload", "--ref_reward_offload")
    return part(keys, SCORING, of, backend="deepspeed", devices=_pool(keys, role)[2], param_offload=offload)


def _pool(keys: Keys, role: str) -> tuple[int, int, int]:
    nodes = keys.integer(f"--{role}.num_nodes", f"--{role}_num_nodes", default=1, of=f"{role}.nodes") or 0
    per_node = (
        keys.integer(
            f"--{role}.num_gpus_per_node", f"--{role}_num_gpus_per_node", default=8, of=f"{role}.devices_per_node"
        )
        or 0
    )
    if nodes < 1 or per_node < 1:
        message = f"{keys.launch.name}: --{role}.num_nodes={nodes}, --{role}.num_gpus_per_node={per_node}: no devices"
        raise RefusedImportError(Refusal.NO_DEVICES, message)
    return nodes, per_node, nodes * per_node


def _others(keys: Keys, roles: tuple[str, ...]) -> int:
    """Devices of roles that do not share the actor's."""
    if keys.flag("--train.colocate_all", "--colocate_all_models"):
        return 0
    with_actor = keys.flag("--train.colocate_actor_ref", "--colocate_actor_ref")
    own = [role for role in ("critic",) if role in roles] + ([] if with_actor or "reference" not in roles else ["ref"])
    total = sum(_pool(keys, role)[2] for role in own)
    if "reward" in roles and not keys.flag("--train.colocate_critic_reward", "--colocate_critic_reward"):
        total += _pool(keys, "reward")[2]
    return total


def _roles(keys: Keys, algorithm: str | None) -> tuple[str, ...]:
    coefficient = keys.number("--algo.kl.init_coef", "--init_kl_coef", default=0.01, of="kl_coefficient")
    remote = keys.has("--reward.remote_url", "--remote_rm_url")
    reward = keys.has("--reward.model_name_or_path", "--reward_pretrain") or keys.has("--reward.num_nodes")
    return (
        "actor",
        *(("reference",) if coefficient != 0 else ()),
        *(("critic",) if algorithm == "gae" else ()),
        *(("reward",) if reward and not remote else ()),
    )


def _models(keys: Keys) -> dict[str, str]:
    found = {
        "actor": keys.text("--actor.model_name_or_path", "--pretrain"),
        "critic": keys.text("--critic.model_name_or_path", "--critic_pretrain"),
        "reward": keys.text("--reward.model_name_or_path", "--reward_pretrain"),
    }
    return {role: model for role, model in found.items() if model}
