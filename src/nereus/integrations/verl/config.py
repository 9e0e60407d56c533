"""verl's keys. Defaults: verl/trainer/config/_generated_ppo_trainer.yaml and _generated_ppo_megatron_trainer.yaml of
verl 0.7 (commit b178a3c); those of streaming jobs: experimental/fully_async_policy/config of the same.
"""

from __future__ import annotations

import re
from typing import Any

from nereus.integrations._keys import Keys
from nereus.integrations._tables import Table, degree, fill, name, part, recompute, size, switch
from nereus.integrations.imported import Batch, Imported, MiniBatch, Part, Refusal, RefusedImportError

ROOTS = (
    "actor_rollout_ref",
    "critic",
    "data",
    "trainer",
    "algorithm",
    "reward_model",
    "reward",
    "rollout",
    "async_training",
)

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"


def _fsdp(role: str, config: str) -> Table:
    return {
        "sp": degree(f"{role}.ulysses_sequence_parallel_size", f"{config}.ulysses_sequence_parallel_size"),
        "shard": degree(f"{config}.fsdp_size"),
        "param_offload": switch(f"{config}.param_offload", f"{config}.offload_policy"),
        "optimizer_offload": switch(f"{config}.optimizer_offload", f"{config}.offload_policy"),
    }


def _megatron(config: str) -> Table:
    override = f"{config}.override_transformer_config"
    return {
        "tp": degree(f"{config}.tensor_model_parallel_size"),
        "pp": degree(f"{config}.pipeline_model_parallel_size"),
        "cp": degree(f"{config}.context_parallel_size"),
        "ep": degree(f"{config}.expert_model_parallel_size"),
        "expert_tp": degree(f"{config}.expert_tensor_parallel_size"),
        "vpp": degree(f"{config}.virtual_pipeline_model_parallel_size"),
        "first_stage_layers": degree(f"{override}.num_layers_in_first_pipeline_stage"),
        "last_stage_layers": degree(f"{override}.num_layers_in_last_pipeline_stage"),
        "pipeline_layout": name(f"{override}.pipeline_model_parallel_layout"),
        "sequence_parallel": switch(f"{config}.sequence_parallel", default=True),
        "param_offload": switch(f"{config}.param_offload"),
        "optimizer_offload": switch(f"{config}.optimizer_offload"),
        "recompute": recompute(f"{override}.recompute_granularity", default="none"),
    }


def _micro(role: str, which: str) -> Table:
    return {
        "micro_batch": size(f"{role}.{which}micro_batch_size_per_gpu"),
        "step_micro_batch": size(f"{role}.{which}micro_batch_size"),
    }


CONTEXT = (f"{MODEL}.override_config.max_position_embeddings", f"{ROLLOUT}.max_model_len")

CHUNKED = (
    f"{ACTOR}.entropy_from_logits_with_chunking",
    f"{ACTOR}.fsdp_config.entropy_from_logits_with_chunking",
)
REWARD = ("reward_model", "reward.reward_model")
"""Where the section of the reward model lies, of today's versions and of newer ones."""

GENERATION: Table = {
    "backend": name(f"{ROLLOUT}.name"),
    "tp": degree(f"{ROLLOUT}.tensor_model_parallel_size", default=2),
    "dp": degree(f"{ROLLOUT}.data_parallel_size"),
    "pp": degree(f"{ROLLOUT}.pipeline_model_parallel_size"),
    "ep": degree(f"{ROLLOUT}.expert_parallel_size"),
    "dtype": name(f"{ROLLOUT}.dtype", default="bfloat16"),
}
"""`dp` of a rollout is the engine's own (attention) data parallelism, not the number of engines."""

BATCH: Table = {
    "prompts": degree("data.train_batch_size", default=1024),
    "samples_per_prompt": degree(f"{ROLLOUT}.n", default=1),
    "mini_batch": degree(f"{ACTOR}.ppo_mini_batch_size", default=256),
    "epochs": degree(f"{ACTOR}.ppo_epochs", default=1),
    "max_prompt_tokens": degree("data.max_prompt_length", default=512),
    "max_response_tokens": degree("data.max_response_length", default=512),
    "packed": switch(f"{ACTOR}.use_dynamic_bsz", default=False),
    "unpadded": switch(f"{MODEL}.use_remove_padding", default=True),
}


def imported(keys: Keys) -> Imported:
    """What a verl configuration says."""
    if other := keys.runs(r"verl\.[\w.]*(sft|main_gen|main_eval)"):
        raise RefusedImportError(Refusal.NO_BATCH, f"{keys.launch.name}: {other} is no RL step")
    nodes = keys.integer("trainer.nnodes", default=1, of="nodes") or 0
    per_node = keys.integer("trainer.n_gpus_per_node", default=8, of="devices_per_node") or 0
    if nodes < 1 or per_node < 1:
        raise RefusedImportError(
            Refusal.NO_DEVICES,
            f"{keys.launch.name}: trainer.nnodes={nodes} and trainer.n_gpus_per_node={per_node} give no devices",
        )
    training = nodes * per_node
    apart, scoring = _rollout_pool(keys), _reward_pool(keys)
    algorithm = keys.text("algorithm.adv_estimator", default="gae", of="algorithm")
    if algorithm is not None and not re.search("[a-zA-Z]", algorithm):
        raise keys.invalid("algorithm.adv_estimator", "is no name, such as gae, grpo, rloo or remax")
    batch = _batch(keys)
    roles = _roles(keys, algorithm)
    actor = _trained(keys, ACTOR, f"{ACTOR}.fsdp_config", "actor", MODEL, training)
    engine = part(keys, GENERATION, "rollout", devices=apart or training)
    return Imported(
        framework="verl",
        algorithm=algorithm,
        models=_models(keys),
        roles=roles,
        nodes=nodes,
        devices_per_node=per_node,
        devices=training + (apart or 0) + (scoring or 0),
        colocated=apart is None,
        actor=actor,
        rollout=engine,
        batch=batch,
        reference=_reference(keys, actor) if "reference" in roles or keys.starts(f"{REF}.") else None,
        critic=_critic(keys, training) if "critic" in roles else None,
        reward=_reward_part(keys, training, scoring) if "reward" in roles else None,
        kv_share=keys.number(f"{ROLLOUT}.gpu_memory_utilization", default=0.5, of="kv_share"),
        asynchronous=apart is not None,
        device_lists={"reward": tuple(range(training, training + scoring))} if scoring else {},
        rollout_nodes=keys.integer("rollout.nnodes", default=1) if apart else None,
        context_tokens=keys.integer(*CONTEXT, needed=False),
        notes=_notes(keys, batch),
    )


def _rollout_pool(keys: Keys) -> int | None:
    """Devices that only generate: one-step-off and fully asynchronous jobs have a `rollout` section of their own."""
    if not keys.has("rollout.nnodes", "rollout.n_gpus_per_node"):
        return None
    nodes = keys.integer("rollout.nnodes", default=1, of="rollout.nodes") or 1
    return nodes * (keys.integer("rollout.n_gpus_per_node", default=8, of="rollout.devices_per_node") or 8)


def _reward(*names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names for section in REWARD)


def _reward_pool(keys: Keys) -> int | None:
    """Devices that only score, where the reward model has a pool of its own."""
    if not (keys.flag(*_reward("enable")) and keys.flag(*_reward("enable_resource_pool"))):
        return None
    nodes, each = (keys.integer(*_reward(name), default=0) or 0 for name in ("nnodes", "n_gpus_per_node"))
    if nodes * each < 1:
        raise keys.invalid("reward_model.enable_resource_pool", f"is set, for {nodes} nodes of {each} devices")
    return nodes * each


def _reward_part(keys: Keys, training: int, own: int | None) -> Part:
    """The reward model: an engine like the rollout's in newer versions, else as the critic is. An engine that shares
    devices sleeps while others work, its weights in host memory.
    """
    devices = own or training
    if keys.has(*_reward("rollout.name")) or keys.flag(*_reward("use_reward_loop"), default=False):
        tp = degree(*_reward("rollout.tensor_model_parallel_size"), default=2)
        sleeps = own is None and keys.flag(*_reward("rollout.free_cache_engine"), default=True)
        table = {"tp": tp, "backend": name(*_reward("rollout.name"))}
        return part(keys, table, "reward", devices=devices, param_offload=sleeps)
    micro: Table = {
        "micro_batch": size(*_reward("micro_batch_size_per_gpu")),
        "step_micro_batch": size(*_reward("micro_batch_size")),
        "tokens": size(*_reward("forward_max_token_len_per_gpu")),
    }
    if _is_megatron(keys, REWARD[0]):
        table = _megatron(f"{REWARD[0]}.megatron") | micro
        return part(keys, table, "reward", backend="megatron", devices=devices)
    table = _fsdp(REWARD[0], f"{REWARD[0]}.model.fsdp_config") | micro
    return part(keys, table, "reward", backend="fsdp", zero=3, devices=devices)


def _batch(keys: Keys) -> Batch:
    values = fill(keys, BATCH, "batch")
    stream = None
    if values["prompts"] == 0:
        if _rollout_pool(keys) is None and not keys.starts("async_training.") and not keys.runs("async"):
            raise keys.invalid(
                "data.train_batch_size", "is 0, which only a job with devices that only generate may say"
            )
        # A streaming job waits for so many prompts before it updates, not for a whole batch of the data loader.
        stream = values["mini_batch"] * (
            keys.integer("async_training.require_batches", default=1, of="batch.stream") or 1
        )
    return Batch(mini_batch_unit=MiniBatch.PROMPTS, stream_prompts=stream, loss=_loss(keys), **values)


def _loss(keys: Keys) -> str:
    """Fused kernels need no logits; else the gradient replaces them where the update asks for no entropy."""
    if keys.flag(f"{MODEL}.use_fused_kernels", default=False):
        return "fused"
    if (keys.number(f"{ACTOR}.entropy_coeff", default=0.0) or 0.0) > 0:
        return "eager"
    if _is_megatron(keys, ACTOR):
        return "vocab_parallel"
    return "in_place_chunked" if keys.flag(*CHUNKED, default=False) else "in_place"


def _roles(keys: Keys, algorithm: str | None) -> tuple[str, ...]:
    critic = keys.flag("critic.enable")
    reference = keys.flag(f"{ACTOR}.use_kl_loss", default=False) or keys.flag(
        "algorithm.use_kl_in_reward", default=False
    )
    return (
        "actor",
        *(("reference",) if reference else ()),
        *(("critic",) if (critic if critic is not None else algorithm == "gae") else ()),
        *(("reward",) if keys.flag(*_reward("enable"), default=False) else ()),
    )


def _models(keys: Keys) -> dict[str, str]:
    found = {
        "actor": keys.text(f"{MODEL}.path"),
        "critic": keys.text("critic.model.path"),
        "reward": keys.text(*_reward("model.path", "model_path")),
    }
    return {role: model for role, model in found.items() if model}


def _is_megatron(keys: Keys, role: str) -> bool:
    strategy = keys.text(f"{role}.strategy", "model_engine")
    named = keys.text("--config-name") or ""
    return strategy == "megatron" or "megatron" in named or keys.starts(f"{ACTOR}.megatron.")


def _trained(keys: Keys, role: str, config: str, of: str, model: str, devices: int) -> Part:
    """The actor or the critic."""
    most = 16384 if of == "actor" else 32768
    budget = most if keys.flag(f"{role}.use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz") else None
    micro = _micro(role, "ppo_") | {"tokens": size(f"{role}.ppo_max_token_len_per_gpu", default=budget)}
    more: dict[str, Any] = {"devices": devices, "dtype": "bfloat16"}
    if _is_megatron(keys, role):
        return part(keys, _megatron(f"{role}.megatron") | micro, of, backend="megatron", zero=1, **more)
    # Megatron does not look at this key: its recomputation is in override_transformer_config.
    checkpointing = keys.flag(f"{model}.enable_gradient_checkpointing", default=True, of=f"{of}.recompute")
    more["backend"] = keys.text(f"{role}.strategy", default="fsdp") or "fsdp"
    return part(keys, _fsdp(role, config) | micro, of, zero=3, recompute="full" if checkpointing else "none", **more)


def _reference(keys: Keys, actor: Part) -> Part:
    """The reference; where it says nothing it follows the actor."""
    micro = _micro(REF, "log_prob_") | {
        "tokens": size(f"{REF}.log_prob_max_token_len_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    }
    inherited: dict[str, Any] = {"backend": actor.backend, "devices": actor.devices, "dtype": actor.dtype}
    if actor.backend == "megatron":
        inherited |= {"tp": actor.tp, "pp": actor.pp, "cp": actor.cp, "ep": actor.ep}
        return part(keys, _megatron(f"{REF}.megatron") | micro, "reference", **inherited)
    return part(keys, _fsdp(REF, f"{REF}.fsdp_config") | micro, "reference", **inherited | {"sp": actor.sp, "zero": 3})


def _critic(keys: Keys, devices: int) -> Part:
    return _trained(keys, "critic", "critic.model.fsdp_config", "critic", "critic.model", devices)


def _notes(keys: Keys, batch: Batch) -> tuple[str, ...]:
    found = ["mini_batch and prompts count prompts, each with samples_per_prompt responses"]
    if keys.has(f"{ROLLOUT}.n_agent"):
        found.append(f"{ROLLOUT}.n_agent is a fork's key and is not read; samples_per_prompt is {ROLLOUT}.n")
    if keys.has(f"{MODEL}.lora_rank") and (keys.integer(f"{MODEL}.lora_rank", default=0) or 0) > 0:
        found.append("LoRA trains adapters only; memory and time here are those of full fine-tuning")
    if keys.flag("algorithm.filter_groups.enable", default=False):
        found.append("filter_groups samples more prompts until enough count; only one batch of them is planned")
    if batch.stream_prompts is not None:
        found.append(f"a streaming job: it updates after {batch.stream_prompts} prompts (require_batches x mini_batch)")
    return tuple(found)
