"""What an imported configuration states, as one flat record in the field's common column names.

`total_gpus`, `nnodes` and `gpus_per_node` follow the framework: verl, slime and OpenRLHF count the devices that train,
NeMo RL, ROLL and AReaL those of the whole job. `rollout_gpus` counts the devices that generate, of each node where
there are `rollout_nnodes`; OpenRLHF's number of engines. `mini_batch_size` is the framework's own number.
"""

from __future__ import annotations

from typing import TypeAlias

from nereus.integrations.imported import Imported, Part

Record: TypeAlias = dict[str, "str | int | float | bool | None"]
TRAINING_ONLY = ("verl", "slime", "openrlhf")


def stated(found: Imported) -> Record:
    """The record; None where the file says nothing and the framework has no default that we know."""
    actor, rollout, batch = found.actor, found.rollout, found.batch
    micro = found.actor.micro_batch or found.actor.step_micro_batch
    return {
        "framework": found.framework,
        "algorithm": found.algorithm,
        "model": found.models.get("actor"),
        "nnodes": found.nodes,
        "gpus_per_node": found.devices_per_node,
        "total_gpus": actor.devices if found.framework in TRAINING_ONLY else found.devices,
        "placement": "colocated" if found.colocated or found.colocates_others else "separate",
        "train_backend": actor.backend,
        **_degrees("actor", actor),
        "actor_cp": actor.cp,
        "actor_ep": actor.ep,
        "fsdp_size": actor.shard,
        "rollout_engine": rollout.backend,
        "rollout_nnodes": found.rollout_nodes,
        "rollout_gpus": _generating(found),
        "rollout_tp": rollout.tp,
        "rollout_dp": rollout.dp,
        "rollout_pp": rollout.pp,
        "rollout_ep": rollout.ep,
        **_degrees("ref", found.reference),
        **_degrees("critic", found.critic),
        "train_batch_size": batch.prompts,
        "rollout_n": batch.samples_per_prompt,
        "mini_batch_size": batch.mini_batch,
        "micro_batch_per_gpu": micro,
        "max_prompt_len": batch.max_prompt_tokens,
        "max_response_len": batch.max_response_tokens,
        "max_seq_len": batch.max_sequence_tokens,
        "dynamic_bsz": batch.packed,
        "max_tokens_per_gpu": actor.tokens,
        "gpu_memory_utilization": found.kv_share,
        "param_offload": actor.param_offload,
        "optimizer_offload": actor.optimizer_offload,
        "grad_checkpointing": actor.recompute,
    }


def _generating(found: Imported) -> int | None:
    if found.framework == "openrlhf":
        return found.rollout.dp
    devices = found.rollout.devices
    return devices // found.rollout_nodes if devices and found.rollout_nodes else devices


def _degrees(name: str, part: Part | None) -> Record:
    return {f"{name}_{axis}": getattr(part, axis) if part else None for axis in ("tp", "pp", "sp")}
