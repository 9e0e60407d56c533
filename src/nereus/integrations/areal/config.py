"""AReaL's keys. Devices are laid out by an allocation: `backend:dNpNtNcNeN` for the engine and for training, in two
keys or joined by `+` in one. Defaults: areal/api/cli_args.py (commit 4aef98d).
"""

from __future__ import annotations

import re
from typing import Any

from nereus.integrations._keys import Keys
from nereus.integrations.imported import Batch, Imported, MiniBatch, Part, Refusal, RefusedImportError

ROOTS = ("actor", "rollout", "gconfig", "allocation_mode", "train_dataset", "cluster")

AXES = {"d": "dp", "p": "pp", "t": "tp", "c": "cp", "e": "ep"}
KV_SHARE = {"sglang": "sglang.mem_fraction_static", "vllm": "vllm.gpu_memory_utilization"}
CONTEXT = {"sglang": "sglang.context_length", "vllm": "vllm.max_model_len"}


def imported(keys: Keys) -> Imported:
    """What an AReaL configuration says."""
    if not any(keys.starts(section) for section in ("gconfig.", "rollout.", "allocation_mode")):
        message = f"{keys.launch.name}: no gconfig, rollout or allocation_mode: no RL step, nothing is generated"
        raise RefusedImportError(Refusal.NO_BATCH, message)
    nodes = keys.integer("cluster.n_nodes", default=1, of="nodes") or 0
    per_node = keys.integer("cluster.n_gpus_per_node", default=8, of="devices_per_node")
    engine, training = _allocations(keys)
    total = nodes * (per_node or 0)
    needed = (engine.devices or 0) + (training.devices or 0)
    if (total < 1 and per_node != 0) or (needed < 1 and total < 1):
        message = f"{keys.launch.name}: cluster.n_nodes={nodes}, cluster.n_gpus_per_node={per_node}: no devices"
        raise RefusedImportError(Refusal.NO_DEVICES, message)
    colocated = "|" in (keys.text("allocation_mode") or "") and "(" not in (keys.text("allocation_mode") or "")
    roles = ["actor"]
    if (keys.number("actor.kl_ctl", default=0.1, of="kl_penalty") or 0.0) > 0:
        roles.append("reference")
    if keys.starts("critic."):
        roles.append("critic")
    backend = engine.backend or "sglang"
    return Imported(
        framework="areal",
        algorithm="ppo" if "critic" in roles else "grpo",
        models={"actor": model} if (model := keys.text("actor.path", "vllm.model", "sglang.model_path")) else {},
        roles=tuple(roles),
        nodes=nodes,
        devices_per_node=per_node,
        devices=total,
        colocated=colocated,
        actor=training,
        rollout=engine,
        batch=_batch(keys, backend),
        reference=training if "reference" in roles else None,
        critic=training if "critic" in roles else None,
        kv_share=keys.number(KV_SHARE.get(backend, KV_SHARE["sglang"])),
        asynchronous=(keys.integer("rollout.max_head_offpolicyness", default=0, needed=False) or 0) > 0,
        context_tokens=keys.integer(CONTEXT.get(backend, CONTEXT["sglang"]), needed=False),
        idle_offload=bool(keys.flag("enable_offload")),
        notes=("mini_batch is ppo_n_minibatches, the number of updates in a step",),
    )


def _allocations(keys: Keys) -> tuple[Part, Part]:
    """The engine's part and the trainer's."""
    joined = keys.text("allocation_mode")
    if joined:
        first, _, second = joined.partition("+")
        engine, training = _allocation(keys, "allocation_mode", first), _allocation(keys, "allocation_mode", second)
    else:
        engine = _allocation(keys, "rollout.backend", keys.text("rollout.backend") or "")
        training = _allocation(keys, "actor.backend", keys.text("actor.backend") or "")
    checkpointing = keys.flag("actor.gradient_checkpointing")
    more: dict[str, Any] = {
        "recompute": None if checkpointing is None else "full" if checkpointing else "none",
        "tokens": keys.integer("actor.mb_spec.max_tokens_per_mb", needed=False),
        "dtype": keys.text("actor.dtype"),
    }
    backend = training.pop("backend", None) or "fsdp"
    zero = 1 if backend == "megatron" else 3
    return Part(**engine), Part(backend=backend, zero=zero, **training, **more)


def _allocation(keys: Keys, key: str, text: str) -> dict[str, Any]:
    """Degrees of `sglang:d4p1t2`, `d4p1t1c2`, or `megatron:(attn:d1p12t4|ffn:d1p12e4)`; devices are d x p x t x c."""
    if not text:
        return {}
    named = re.fullmatch(r"(?:(sglang|vllm|fsdp|megatron|archon|cpu|eval)(?:\[\w+\])?[:.])?(.*)", text.strip())
    backend, degrees = (named.group(1), named.group(2)) if named else (None, text)
    experts = re.fullmatch(r"\((?:attn:)?([a-z0-9]+)\|(?:ffn:)?([a-z0-9]+)\)", degrees)
    axes = _axes(keys, key, experts.group(1) if experts else degrees, text)
    if experts:
        axes["ep"] = _axes(keys, key, experts.group(2), text).get("ep", 1)
    size = axes.get("dp", 1) * axes.get("pp", 1) * axes.get("tp", 1) * axes.get("cp", 1)
    return {"backend": backend, "devices": size, **axes}


def _axes(keys: Keys, key: str, degrees: str, text: str) -> dict[str, int]:
    found = re.findall(r"([dptce])(\d+)", degrees)
    if "".join(axis + number for axis, number in found) != degrees or not found or any(int(n) < 1 for _, n in found):
        raise keys.invalid(key, f"is {text!r}, expected degrees such as d4p1t2 (d, p, t, c, e, each at least 1)")
    return {AXES[axis]: int(number) for axis, number in found}


def _batch(keys: Keys, backend: str) -> Batch:
    prompts = keys.integer("train_dataset.batch_size", "rollout.consumer_batch_size")
    if prompts is None:
        message = f"{keys.launch.name}: train_dataset.batch_size is missing, so is rollout.consumer_batch_size"
        raise RefusedImportError(Refusal.NO_BATCH, message)
    return Batch(
        prompts=prompts,
        samples_per_prompt=keys.integer("gconfig.n_samples", default=1, of="batch.samples_per_prompt"),
        mini_batch=keys.integer("actor.ppo_n_minibatches", default=4, of="batch.mini_batch"),
        mini_batch_unit=MiniBatch.UPDATES,
        max_prompt_tokens=keys.integer("train_dataset.max_length"),
        max_response_tokens=keys.integer("gconfig.max_new_tokens"),
        max_sequence_tokens=keys.integer(CONTEXT.get(backend, CONTEXT["sglang"]), "gconfig.max_tokens"),
        packed=True,
        unpadded=True,
    )
