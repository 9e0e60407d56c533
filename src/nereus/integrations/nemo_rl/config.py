"""NeMo RL's keys. Every example inherits its values from a base file, so there are few defaults to take:
examples/configs/grpo_math_1B.yaml (commit 7ea279a) is the base of most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nereus.integrations._keys import Keys
from nereus.integrations._tables import Table, degree, fill, name, part, size, switch
from nereus.integrations.imported import Batch, Imported, MiniBatch, Part, Refusal, RefusedImportError

ROOTS = ("policy", "grpo", "ppo", "cluster", "value", "loss_fn")

MEGATRON, DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
MICRO: Table = {"micro_batch": size("policy.train_micro_batch_size"), "dtype": name("policy.precision")}


def _megatron(config: str) -> Table:
    return {
        "tp": degree(f"{config}.tensor_model_parallel_size", default=1),
        "pp": degree(f"{config}.pipeline_model_parallel_size", default=1),
        "cp": degree(f"{config}.context_parallel_size", default=1),
        "ep": degree(f"{config}.expert_model_parallel_size", default=1),
        "expert_tp": degree(f"{config}.expert_tensor_parallel_size"),
        "first_stage_layers": degree(f"{config}.num_layers_in_first_pipeline_stage"),
        "last_stage_layers": degree(f"{config}.num_layers_in_last_pipeline_stage"),
        "sequence_parallel": switch(f"{config}.sequence_parallel"),
    }


def _dtensor(config: str) -> Table:
    return {
        "tp": degree(f"{config}.tensor_parallel_size", default=1),
        "cp": degree(f"{config}.context_parallel_size", default=1),
        "ep": degree(f"{config}.expert_parallel_size"),
        "sequence_parallel": switch(f"{config}.sequence_parallel"),
        "param_offload": switch(f"{config}.cpu_offload"),
        "optimizer_offload": switch(f"{config}.cpu_offload"),
    }


VLLM, SGLANG = "policy.generation.vllm_cfg", "policy.generation.sglang_cfg"
ENGINES: dict[str, Table] = {
    "vllm": {
        "tp": degree(f"{VLLM}.tensor_parallel_size", default=1),
        "pp": degree(f"{VLLM}.pipeline_parallel_size"),
        "ep": degree(f"{VLLM}.expert_parallel_size"),
        "dtype": name(f"{VLLM}.precision"),
    },
    "sglang": {
        "tp": degree(f"{SGLANG}.tp_size", f"{SGLANG}.gpus_per_server", default=1),
        "pp": degree(f"{SGLANG}.pp_size"),
        "ep": degree(f"{SGLANG}.ep_size"),
        "dtype": name(f"{SGLANG}.dtype"),
    },
    "trtllm": {
        "tp": degree("policy.generation.trtllm_cfg.tensor_parallel_size", default=1),
        "ep": degree("policy.generation.trtllm_cfg.expert_parallel_size"),
    },
    "megatron": {
        "tp": degree("policy.generation.mcore_generation_config.tensor_model_parallel_size", default=1),
    },
}
PACKING = ("dynamic_batching", "sequence_packing")
KV_SHARE = (
    f"{VLLM}.gpu_memory_utilization",
    f"{SGLANG}.mem_fraction_static",
    "policy.generation.trtllm_cfg.kv_fraction",
)


def imported(keys: Keys) -> Imported:
    """What a NeMo RL configuration says."""
    nodes, per_node = _cluster(keys)
    devices = nodes * per_node
    section = "ppo" if keys.starts("ppo.") else "grpo"
    batch = _batch(keys, section)
    generating, apart_nodes = _generation_pool(keys, per_node)
    training = _training_devices(keys, devices, generating or 0)
    actor = _trained(keys, "policy", MEGATRON, DTENSOR, training)
    critic = section == "ppo" or keys.starts("value.")
    reference = (keys.number("loss_fn.reference_policy_kl_penalty", default=0.01, of="kl_penalty") or 0.0) > 0
    return Imported(
        framework="nemo-rl",
        algorithm=keys.text(f"{section}.adv_estimator.name", default="gae" if section == "ppo" else "grpo"),
        models={
            role: model
            for role, model in (("actor", keys.text("policy.model_name")), ("critic", keys.text("value.model_name")))
            if model
        },
        roles=("actor", *(("reference",) if reference else ()), *(("critic",) if critic else ())),
        nodes=nodes,
        devices_per_node=per_node,
        devices=devices,
        colocated=generating is None,
        actor=actor,
        rollout=_engine(keys, generating or devices),
        batch=batch,
        reference=replace(actor, param_offload=True) if reference else None,
        critic=_critic(keys, training) if critic else None,
        rollout_nodes=apart_nodes,
        kv_share=keys.number(*KV_SHARE),
        asynchronous=bool(keys.flag(f"{section}.async_{section}.enabled")),
        context_tokens=batch.max_sequence_tokens,
        idle_offload=generating is None,
        notes=_notes(keys, section),
    )


def _notes(keys: Keys, section: str) -> tuple[str, ...]:
    found = (
        "mini_batch is train_global_batch_size, in samples",
        "the reference has the layout of the policy and waits on the host",
    )
    if keys.flag(f"{section}.use_dynamic_sampling", default=False):
        return *found, "dynamic sampling samples more prompts until enough count; only one batch of them is planned"
    return found


def _training_devices(keys: Keys, devices: int, generating: int) -> int:
    if generating >= devices:
        raise keys.invalid(
            "policy.generation.colocated", f"takes {generating} of {devices} devices, none is left to train"
        )
    return devices - generating


def _cluster(keys: Keys) -> tuple[int, int]:
    """Nodes, and devices of each."""
    nodes = keys.integer("cluster.num_nodes", default=1, of="nodes") or 0
    per_node = keys.integer("cluster.gpus_per_node", default=1, of="devices_per_node") or 0
    if nodes < 1 or per_node < 1 or not keys.has("cluster.num_nodes", "cluster.gpus_per_node"):
        message = f"{keys.launch.name}: cluster.num_nodes={nodes}, cluster.gpus_per_node={per_node}: no devices"
        raise RefusedImportError(Refusal.NO_DEVICES, message)
    return nodes, per_node


def _generation_pool(keys: Keys, per_node: int) -> tuple[int | None, int | None]:
    """Devices and nodes that only generate; None where generation shares the policy's."""
    if keys.flag("policy.generation.colocated.enabled", default=True, of="colocated"):
        return None, None
    resources = "policy.generation.colocated.resources"
    nodes = keys.integer(f"{resources}.num_nodes")
    each = keys.integer(f"{resources}.gpus_per_node", default=per_node) or per_node
    return (nodes or 1) * each, nodes


def _batch(keys: Keys, section: str) -> Batch:
    prompts = keys.integer(f"{section}.num_prompts_per_step")
    if prompts is None:
        missing = ", ".join(keys.launch.missing)
        hint = f"; it inherits {missing}, which is not beside the file" if missing else ""
        message = f"{keys.launch.name}: {section}.num_prompts_per_step is missing{hint}"
        raise RefusedImportError(Refusal.NO_BATCH, message)
    # Dynamic batching sorts by length first: next to nothing is padded.
    packed = any(keys.flag(f"policy.{way}.enabled") for way in PACKING)
    total = keys.integer("policy.max_total_sequence_length")
    return Batch(
        prompts=prompts,
        samples_per_prompt=keys.integer(
            f"{section}.num_generations_per_prompt", default=1, of="batch.samples_per_prompt"
        ),
        mini_batch=keys.integer("policy.train_global_batch_size"),
        mini_batch_unit=MiniBatch.SAMPLES,
        epochs=keys.integer("ppo.ppo_epochs", default=1) or 1,
        max_prompt_tokens=keys.integer("data.max_input_seq_length", default=total, of="batch.max_prompt_tokens"),
        max_response_tokens=keys.integer(
            "policy.generation.max_new_tokens", default=total, of="batch.max_response_tokens"
        ),
        max_sequence_tokens=total,
        packed=packed,
        unpadded=packed,
    )


def _trained(keys: Keys, section: str, megatron: str, dtensor: str, devices: int) -> Part:
    micro: Table = {
        "micro_batch": size(f"{section}.train_micro_batch_size"),
        "dtype": name(f"{section}.precision", "policy.precision"),
    }
    of = "actor" if section == "policy" else "critic"
    more: dict[str, Any] = {"devices": devices, "tokens": _budget(keys, section)}
    if keys.flag(f"{megatron}.enabled"):
        full = keys.flag(f"{megatron}.activation_checkpointing")
        table = _megatron(megatron) | micro
        return part(keys, table, of, backend="megatron", zero=1, recompute="full" if full else "none", **more)
    full = keys.flag(f"{dtensor}.activation_checkpointing")
    table = _dtensor(dtensor) | micro
    return part(keys, table, of, backend="dtensor/fsdp2", zero=3, recompute="full" if full else "none", **more)


def _budget(keys: Keys, section: str) -> int | None:
    """Tokens of a packed micro-batch; what the base files compute is so many sequences of the greatest length."""
    way = next((way for way in PACKING if keys.flag(f"{section}.{way}.enabled")), None)
    if way is None:
        return None
    key = f"{section}.{way}.train_mb_tokens"
    if isinstance(keys.value(key), int):
        return keys.integer(key)
    longest = keys.integer(f"{section}.max_total_sequence_length", "policy.max_total_sequence_length", needed=False)
    micro = keys.integer(f"{section}.train_micro_batch_size", needed=False)
    return longest * micro if longest and micro else None


def _critic(keys: Keys, devices: int) -> Part:
    if keys.starts("value."):
        return _trained(keys, "value", "value.megatron_cfg", "value.dtensor_cfg", devices)
    return _trained(keys, "policy", MEGATRON, DTENSOR, devices)


def _engine(keys: Keys, devices: int) -> Part:
    backend = keys.text("policy.generation.backend", default="vllm", of="rollout.backend") or "vllm"
    return Part(backend=backend, devices=devices, **fill(keys, ENGINES.get(backend, {}), "rollout"))
