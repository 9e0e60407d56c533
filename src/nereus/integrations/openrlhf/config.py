"""OpenRLHF's flags, the dotted ones of today and the older ones with underscores. Defaults:
openrlhf/cli/train_ppo_ray.py (commit 3c3be62).
"""

from __future__ import annotations

from dataclasses import replace

from nereus.clusters.file import MOST_DEVICES
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
    "max_response_tokens": degree("--rollout.max_new_tokens", "--max_new_tokens", "--generate_max_len"),
    "max_sequence_tokens": degree("--data.max_len", "--max_len", default=2048),
    "unpadded": switch("--ds.packing_samples", "--packing_samples", default=False),
    "packed": switch("--train.dynamic_batch_enable", "--use_dynamic_batch", default=False),
}


def imported(keys: Keys) -> Imported:
    """What an OpenRLHF command line says."""
    if other := keys.runs(r"openrlhf\.cli\.(?!train_ppo)"):
        raise RefusedImportError(Refusal.NO_BATCH, f"{keys.launch.name}: {other} is no RL step: nothing is generated")
    nodes, per_node, training = _pool(keys, "actor")
    engines = _engines(keys)
    everything = keys.flag("--train.colocate_all", "--colocate_all_models", default=False)
    engine = fill(keys, ENGINE, "rollout")
    generating = (engines or 0) * int(engine["tp"])
    algorithm = keys.text("--algo.advantage.estimator", "--advantage_estimator", default="gae", of="algorithm")
    roles = _roles(keys, algorithm)
    asynchronous = bool(keys.flag("--train.async_enable", "--async_train"))
    # An asynchronous job keeps its engines apart, whatever it colocates.
    apart = bool(engines) and (asynchronous or not everything)
    placed = _placed(keys, roles, generating if apart else 0)
    return Imported(
        framework="openrlhf",
        algorithm=algorithm,
        models=_models(keys),
        roles=roles,
        nodes=nodes,
        devices_per_node=per_node,
        devices=1 + max(max(held) for held in placed.values()),
        colocated=not apart,
        actor=_trained(keys, "actor"),
        rollout=Part(backend="vllm", devices=generating or training, dp=engines, **engine),
        batch=_batch(keys),
        reference=_scoring(keys, "reference", "ref") if "reference" in roles else None,
        critic=_trained(keys, "critic") if "critic" in roles else None,
        reward=_scoring(keys, "reward", "reward") if "reward" in roles else None,
        kv_share=keys.number(
            "--vllm.gpu_memory_utilization", "--vllm_gpu_memory_utilization", default=0.95, of="kv_share"
        ),
        colocates_others=apart and bool(everything),
        device_lists=placed,
        asynchronous=asynchronous,
        idle_offload=bool(keys.flag("--ds.enable_sleep", "--deepspeed_enable_sleep")),
        notes=("mini_batch counts samples; rollout.dp is the number of vLLM engines; sp is ring attention",),
    )


def _engines(keys: Keys) -> int | None:
    engines = keys.integer("--vllm.num_engines", "--vllm_num_engines", of="rollout.dp")
    if engines is not None and engines < 0:
        message = f"{keys.launch.name}: --vllm.num_engines={engines}: valid are 0 (none) and more"
        raise RefusedImportError(Refusal.INVALID, message)
    return engines


def _older(keys: Keys) -> bool:
    """Until 2026-03 the flags bounded prompt and response, each alone, and micro-batches were larger by default."""
    return keys.has("--prompt_max_len", "--generate_max_len")


def _micro(keys: Keys, table: Table, older: int) -> Table:
    entry, budget = table["micro_batch"], table["tokens"]
    dynamic = keys.flag(*BATCH["packed"].keys, default=False)
    return table | {
        "micro_batch": replace(entry, default=older if _older(keys) else entry.default),
        "tokens": replace(budget, default=16192 if dynamic and table is TRAINING else None),
    }


def _batch(keys: Keys) -> Batch:
    table = BATCH
    if _older(keys):
        prompt, response, whole = (BATCH[f"max_{name}_tokens"] for name in ("prompt", "response", "sequence"))
        bounds = {"prompt": replace(prompt, default=1024), "response": replace(response, default=1024)}
        table = BATCH | {f"max_{name}_tokens": entry for name, entry in bounds.items()}
        table["max_sequence_tokens"] = replace(whole, default=None)
    values = fill(keys, table, "batch")
    ring = keys.integer(*TRAINING["sp"].keys, default=1, needed=False) or 1
    # Both turn packing on by themselves.
    values["unpadded"] = values["unpadded"] or values["packed"] or ring > 1
    return Batch(mini_batch_unit=MiniBatch.SAMPLES, **values)


def _trained(keys: Keys, role: str) -> Part:
    checkpointing = keys.flag("--actor.gradient_checkpointing_enable", "--gradient_checkpointing")
    return part(
        keys, _micro(keys, TRAINING, 4), role, backend="deepspeed", devices=_pool(keys, role)[2],
        recompute="full" if checkpointing else "none",
    )  # fmt: skip


def _scoring(keys: Keys, of: str, role: str) -> Part:
    offload = keys.flag(f"--{role}.offload", "--ref_reward_offload")
    return part(
        keys, _micro(keys, SCORING, 8), of, backend="deepspeed", devices=_pool(keys, role)[2], param_offload=offload
    )


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


def _placed(keys: Keys, roles: tuple[str, ...], generating: int) -> dict[str, tuple[int, ...]]:
    """Devices by role, each behind those of the role before it that it does not share with; engines, `generating`
    devices where they have their own, come last."""
    everything = keys.flag("--train.colocate_all", "--colocate_all_models")
    with_actor = everything or keys.flag("--train.colocate_actor_ref", "--colocate_actor_ref")
    with_critic = keys.flag("--train.colocate_critic_reward", "--colocate_critic_reward") and "critic" in roles
    shared = {
        "reference": "actor_train" if with_actor else None,
        "critic": "actor_train" if everything else None,
        "reward": "actor_train" if everything else "critic" if with_critic else None,
    }
    used = 0

    def behind(size: int) -> tuple[int, ...]:
        nonlocal used
        used += size
        if used > MOST_DEVICES:
            message = f"{keys.launch.name}: its roles have {used:,} devices, at most {MOST_DEVICES:,} are valid"
            raise RefusedImportError(Refusal.INVALID, message)
        return tuple(range(used - size, used))

    found = {"actor_train": behind(_pool(keys, "actor")[2])}
    for role, name in (("reference", "ref"), ("critic", "critic"), ("reward", "reward")):
        if role in roles:
            other = shared[role]
            found[role] = found[other] if other else behind(_pool(keys, name)[2])
    if generating:
        found["actor_infer"] = behind(generating)
    return found


def _roles(keys: Keys, algorithm: str | None) -> tuple[str, ...]:
    coefficient = keys.number("--algo.kl.init_coef", "--init_kl_coef", default=0.01, of="kl_coefficient")
    remote = keys.has("--reward.remote_url", "--remote_rm_url", "--train.agent_func_path", "--agent_func_path")
    reward = keys.has("--reward.model_name_or_path", "--reward_pretrain") or keys.has("--reward.num_nodes")
    return (
        "actor",
        *(("reference",) if coefficient != 0 else ()),
        *(("critic",) if algorithm == "gae" else ()),
        *(("reward",) if reward and not remote else ()),
    )


def _models(keys: Keys) -> dict[str, str]:
    reward = (keys.text("--reward.model_name_or_path", "--reward_pretrain") or "").partition(",")[0]
    found = {
        "actor": keys.text("--actor.model_name_or_path", "--pretrain"),
        "critic": keys.text("--critic.model_name_or_path", "--critic_pretrain") or reward,
        "reward": reward,
    }
    return {role: model for role, model in found.items() if model}
