"""ROLL's keys: each role has its own devices, strategy and strategy options. Defaults: roll/configs/base_config.py
(commit 8eb27cc).
"""

from __future__ import annotations

import re
from typing import Any

from nereus.integrations._keys import Keys
from nereus.integrations._tables import Table, degree, fill, name, part, recompute, size, switch
from nereus.integrations.imported import Batch, Imported, MiniBatch, Part, Refusal, RefusedImportError

ROOTS = ("actor_train", "actor_infer", "rollout_batch_size", "roles", "pretrain", "num_gpus_per_node")


def _role(role: str, *names: str) -> tuple[str, ...]:
    """A key of a role, as the pipeline's file has it and as a flat record of its roles has it."""
    return tuple(f"{prefix}{role}.{name}" for name in names for prefix in ("", "roles."))


def _options(role: str, *names: str) -> tuple[str, ...]:
    return (
        *_role(role, *(f"strategy_args.strategy_config.{name}" for name in names)),
        *_role(role, *(f"strategy_config.{name}" for name in names)),
    )


def _training(role: str) -> Table:
    return {
        "backend": name(*_role(role, "strategy_args.strategy_name", "strategy")),
        "tp": degree(*_options(role, "tensor_model_parallel_size")),
        "pp": degree(*_options(role, "pipeline_model_parallel_size")),
        "vpp": degree(*_options(role, "virtual_pipeline_model_parallel_size")),
        "cp": degree(*_options(role, "context_parallel_size")),
        "ep": degree(*_options(role, "expert_model_parallel_size", "ep_size")),
        "expert_tp": degree(*_options(role, "expert_tensor_parallel_size")),
        "sp": degree(*_role(role, "model_args.ulysses_size"), *_options(role, "ulysses_size")),
        "shard": degree(*_options(role, "fsdp_size")),
        "sequence_parallel": switch(*_options(role, "sequence_parallel")),
        "recompute": recompute(*_options(role, "recompute_granularity")),
        "param_offload": switch(*_options(role, "offload_policy")),
        "optimizer_offload": switch(*_options(role, "optimizer_cpu_offload", "offload_policy")),
        "micro_batch": size(
            *_role(
                role, "training_args.per_device_train_batch_size", "per_device_train_batch_size", "infer_batch_size"
            ),
            default=8 if role in ("actor_train", "critic") else 16,
        ),
        "tokens": size(*_role(role, "max_tokens_per_microbatch_in_train")),
        "dtype": name(*_role(role, "model_args.dtype")),
    }


def _engine(backend: str | None) -> Table:
    """vLLM takes its TP from its options alone, others as many devices as a worker has."""
    worker = () if backend == "vllm" else _role("actor_infer", "num_gpus_per_worker")
    return {
        "backend": name(*_role("actor_infer", "strategy_args.strategy_name", "strategy")),
        "tp": degree(*_options("actor_infer", "tensor_parallel_size", "tp_size"), *worker, default=1),
        "pp": degree(*_options("actor_infer", "pipeline_parallel_size")),
        "dp": degree(*_options("actor_infer", "data_parallel_size", "dp_size")),
        "ep": degree(*_options("actor_infer", "ep_size")),
    }


ACCUMULATION = _role("actor_train", "training_args.gradient_accumulation_steps", "gradient_accumulation_steps")


def imported(keys: Keys) -> Imported:
    """What a ROLL pipeline's file says."""
    train, infer = _mapping(keys, "actor_train"), _mapping(keys, "actor_infer")
    if not infer and not train:
        message = f"{keys.launch.name}: neither actor_train nor actor_infer has a device_mapping"
        raise RefusedImportError(Refusal.NO_DEVICES, message)
    roles = ("reference", "critic", "reward")
    mappings = {role: _mapping(keys, role) for role in roles}
    devices = max(max(mapping) for mapping in (train, infer, *mappings.values()) if mapping) + 1
    per_node = keys.integer("num_gpus_per_node", default=8, of="devices_per_node") or 8
    actor = part(keys, _training("actor_train"), "actor", devices=len(train) or None, zero=_zero(keys, "actor_train"))
    engine = keys.text(*_role("actor_infer", "strategy_args.strategy_name", "strategy"))
    critic = keys.text("adv_estimator") == "gae" or bool(mappings["critic"])
    used = [role for role in ("reference", "reward") if mappings[role] and (role != "reference" or _refers(keys))]
    return Imported(
        framework="roll",
        algorithm=keys.text("adv_estimator", default="gae", of="algorithm"),
        models={"actor": model} if (model := keys.text("pretrain")) else {},
        roles=("actor", *used, *(("critic",) if critic else ())),
        nodes=-(-devices // per_node),
        devices_per_node=per_node,
        devices=devices,
        colocated=bool(set(train) & set(infer)) or not infer,
        actor=actor,
        rollout=part(keys, _engine(engine), "rollout", devices=len(infer) or None),
        batch=_batch(keys, bool(infer)),
        reference=_other(keys, "reference", mappings["reference"]),
        critic=_other(keys, "critic", mappings["critic"]) if critic else None,
        reward=_other(keys, "reward", mappings["reward"]),
        kv_share=keys.number(*_options("actor_infer", "gpu_memory_utilization", "mem_fraction_static")),
        asynchronous=(keys.number("async_generation_ratio") or 0.0) > 0,
        context_tokens=keys.integer(*_options("actor_infer", "max_model_len"), needed=False),
        idle_offload=bool(set(train) & set(infer)),
        device_lists={"actor_train": train, "actor_infer": infer, **{r: m for r, m in mappings.items() if m}},
        notes=("mini_batch is gradient_accumulation_steps: a mini-batch is micro_batch x that x replicas",),
    )


def _other(keys: Keys, role: str, devices: tuple[int, ...]) -> Part | None:
    if not devices:
        return None
    return part(keys, _training(role), role, devices=len(devices), zero=_zero(keys, role))


def _refers(keys: Keys) -> bool:
    """Whether anything asks for the reference's log-probabilities."""
    asked = keys.flag("enable_reference", default=False) or keys.flag("use_kl_loss", default=False)
    return bool(asked) or (keys.number("init_kl_coef", default=0.2, of="kl_penalty") or 0.0) > 0


def _zero(keys: Keys, role: str) -> int:
    backend = keys.text(*_role(role, "strategy_args.strategy_name", "strategy")) or ""
    if backend.startswith("megatron"):
        return 1 if keys.flag(*_options(role, "use_distributed_optimizer"), default=True) else 0
    return 3


def _batch(keys: Keys, generates: bool) -> Batch:
    prompts = keys.integer("rollout_batch_size", default=128 if generates else None, of="batch.prompts")
    if prompts is None:
        message = f"{keys.launch.name}: rollout_batch_size is missing: no RL step, or a pipeline without generation"
        raise RefusedImportError(Refusal.NO_BATCH, message)
    sequence = keys.integer("sequence_length", *_options("actor_infer", "max_model_len"))
    table: Table = {
        "samples_per_prompt": degree("num_return_sequences_in_group", "train_env_manager.group_size", default=1),
        "mini_batch": degree(*ACCUMULATION, default=1),
        "epochs": degree("ppo_epochs", default=1),
        "max_prompt_tokens": degree("prompt_length"),
        "max_response_tokens": degree("response_length"),
    }
    packed = keys.flag(
        *_role("actor_train", "use_sequence_packing", "use_dynamic_batching_in_train"), "use_dynamic_batching_in_train"
    )
    # The agentic pipeline counts trajectories in a batch, the others prompts.
    trajectories = keys.starts("train_env_manager.") and not keys.has("num_return_sequences_in_group")
    # Both: packing lays sequences end to end, dynamic batching puts those of similar length together.
    unpadded = bool(packed)
    more: dict[str, Any] = {
        "unpadded": unpadded,
        "max_sequence_tokens": sequence,
        "packed": packed,
        "prompts_are_samples": trajectories,
    }
    return Batch(prompts, mini_batch_unit=MiniBatch.ACCUMULATION, **fill(keys, table, "batch"), **more)


def _mapping(keys: Keys, role: str) -> tuple[int, ...]:
    """Device ids of a role: `list(range(0,8)) + list(range(16,24))`, `[0, 1]`; none where it has none."""
    raw: Any = keys.value(*_role(role, "device_mapping"))
    if raw is None or raw == "":
        return ()
    if isinstance(raw, list):
        raw = str(raw)
    key = next(key for key in _role(role, "device_mapping") if keys.has(key))
    text = re.sub(r"\s+", "", str(raw))
    found: list[int] = []
    for piece in text.split("+"):
        span = re.fullmatch(r"list\(range\((?:(\d+),)?(\d+)(?:,(\d+))?\)\)", piece)
        listed = re.fullmatch(r"(?:list\()?\[([\d,]*)\]\)?", piece)
        if span:
            start, stop, step = int(span.group(1) or 0), int(span.group(2)), int(span.group(3) or 1)
            found.extend(range(start, min(stop, start + 1_000_000), max(step, 1)))
        elif listed:
            found.extend(int(item) for item in listed.group(1).split(",") if item)
        else:
            raise keys.invalid(key, f"is {raw!r}, expected list(range(a,b)) or [a,b,...]")
    return tuple(dict.fromkeys(found))
