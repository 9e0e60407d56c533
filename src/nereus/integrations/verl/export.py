"""Hydra overrides of verl that realise a plan. Keys as in `config`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nereus.core import Candidate, Stage, Workload
from nereus.integrations.export import Exported
from nereus.integrations.verl.config import ACTOR, MODEL, REF, ROLLOUT

SECTIONS = {"actor": ACTOR, "reference": REF, "critic": "critic", "reward": "reward_model"}
UPDATED = ("actor", "critic")
MICRO = {
    "reference": ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"),
    "reward": ("micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
}
"""Micro-batch and token budget of roles that do not train."""
OVERRIDE = "override_transformer_config"
STAGES = {
    "first": f"{OVERRIDE}.num_layers_in_first_pipeline_stage",
    "last": f"{OVERRIDE}.num_layers_in_last_pipeline_stage",
    "layout": f"{OVERRIDE}.pipeline_model_parallel_layout",
}


def lines(asked: Exported) -> list[str]:
    """Every override, devices and batch first."""
    roles = _roles(asked)
    strategy = _strategy(asked, roles)
    found = {**_pool(asked, roles), **_batch(asked), **_algorithm(asked), **_generation(asked)}
    for role, candidate in roles.items():
        asked.whole_shares(candidate, updated=role in UPDATED)
        section = SECTIONS[role]
        found |= _common(asked, role, section, candidate, strategy)
        found |= _megatron(asked, section, candidate) if strategy == "megatron" else _fsdp(asked, role, candidate)
    return [f"{key}={value}" for key, value in found.items()]


def _roles(asked: Exported) -> dict[str, Candidate]:
    """The roles with weights that train or infer."""
    actor = asked.of("actor", Stage.TRAINING)
    if actor is None or asked.of("actor", Stage.GENERATION) is None:
        raise asked.refuse("actor", "it must both generate and train")
    others = {
        "reference": asked.of("reference", Stage.INFERENCE),
        "critic": asked.of("critic", Stage.TRAINING),
        "reward": asked.of("reward", Stage.INFERENCE),
    }
    return {"actor": actor, **{role: candidate for role, candidate in others.items() if candidate}}


def _strategy(asked: Exported, roles: Mapping[str, Candidate]) -> str:
    """FSDP shards whole models, Megatron cuts them; all roles of a job have the same."""
    cut = [
        c
        for c in roles.values()
        if c.layout.size > 1 or c.ep > 1 or (c.zero < 3 and asked.workflow.updated(c.model_stage))
    ]
    sharded = [c for c in roles.values() if c.zero >= 2]
    if cut and sharded:
        raise asked.refuse(
            sharded[0].model_stage, f"it is sharded (ZeRO-{sharded[0].zero}), {cut[0].model_stage} is cut"
        )
    return "megatron" if cut else "fsdp"


def _pool(asked: Exported, roles: Mapping[str, Candidate]) -> dict[str, object]:
    generation = asked.of("actor", Stage.GENERATION)
    assert generation is not None
    training = frozenset[int]().union(*(asked.devices(c.model_stage) for c in roles.values()))
    for candidate in roles.values():
        if asked.devices(candidate.model_stage) != training:
            raise asked.refuse(candidate.model_stage, "verl gives all roles that train or infer the same devices")
    nodes, each = asked.grid(training, "training")
    found: dict[str, object] = {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": each}
    generating = asked.devices(generation.model_stage)
    if generating == training:
        return found
    if generating & training:
        raise asked.refuse("actor/generation", "it shares some devices with training: all or none")
    nodes, each = asked.grid(generating, "actor/generation")
    return found | {"rollout.nnodes": nodes, "rollout.n_gpus_per_node": each}


def _batch(asked: Exported) -> dict[str, object]:
    work = asked.workload
    prompts, rest = divmod(work.mini_batch, work.samples_per_prompt)
    if rest:
        raise asked.refuse("mini-batch", f"{work.mini_batch} is no whole number of prompts x {work.samples_per_prompt}")
    return {
        "data.train_batch_size": work.prompts,
        f"{ROLLOUT}.n": work.samples_per_prompt,
        f"{ACTOR}.ppo_mini_batch_size": prompts,
        f"{ACTOR}.ppo_epochs": work.epochs,
        f"{MODEL}.use_remove_padding": work.packed,
        f"{ACTOR}.use_dynamic_bsz": work.packed,
        **({f"{MODEL}.use_fused_kernels": True} if work.loss == "fused" else {}),
        "data.max_prompt_length": int(work.prompt.maximum),
        "data.max_response_length": work.max_response_tokens,
        **_context(asked),
    }


def _context(asked: Exported) -> dict[str, object]:
    """Sequences beyond the model's own positions: what the configuration gave it stays given."""
    longest = int(asked.workload.prompt.maximum) + asked.workload.max_response_tokens
    if longest <= asked.workflow.specs["actor"].max_positions:
        return {}
    return {f"+{MODEL}.override_config.max_position_embeddings": longest, f"{ROLLOUT}.max_model_len": longest}


def _algorithm(asked: Exported) -> dict[str, object]:
    calls = {call.name for call in asked.workflow.calls}
    critic = asked.of("critic", Stage.TRAINING) is not None
    estimator = "gae" if critic else "remax" if "generate_greedy" in calls else "grpo"
    reference = asked.of("reference", Stage.INFERENCE) is not None
    return {
        "algorithm.adv_estimator": estimator,
        f"{ACTOR}.use_kl_loss": reference and not critic,
        "algorithm.use_kl_in_reward": reference and critic,
    }


def _generation(asked: Exported) -> dict[str, object]:
    candidate = asked.of("actor", Stage.GENERATION)
    assert candidate is not None
    asked.whole_shares(candidate, updated=False)
    if candidate.layout.pp > 1:
        raise asked.refuse(candidate.model_stage, f"pp {candidate.layout.pp}, but verl's engines have no pipeline")
    return {
        f"{ROLLOUT}.tensor_model_parallel_size": candidate.layout.tp,
        f"{ROLLOUT}.pipeline_model_parallel_size": 1,
        **_engine_experts(asked, candidate),
        f"{ROLLOUT}.gpu_memory_utilization": asked.engine_share(candidate),
        # The cache bounds what runs at once: sequences shorter than the longest leave room for more of them.
        f"{ROLLOUT}.max_num_seqs": asked.workload.sequences // candidate.dp,
    }


def _engine_experts(asked: Exported, candidate: Candidate) -> dict[str, object]:
    """An engine's expert parallelism spans all its ranks: TP times replicas that share experts."""
    if candidate.ep == 1:
        return {}
    replicas, rest = divmod(candidate.ep, candidate.layout.tp)
    if rest or candidate.dp % replicas:
        raise asked.refuse(
            candidate.model_stage,
            f"ep {candidate.ep} must be tp {candidate.layout.tp} times a divisor of dp {candidate.dp}",
        )
    return {f"{ROLLOUT}.data_parallel_size": replicas, f"{ROLLOUT}.expert_parallel_size": candidate.ep}


def _common(asked: Exported, role: str, section: str, candidate: Candidate, strategy: str) -> dict[str, object]:
    micro, budget = MICRO.get(role, ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"))
    found: dict[str, object] = {f"{section}.{micro}": candidate.micro_batch}
    if asked.workload.packed:
        found[f"{section}.{budget}"] = _tokens(asked.workload, candidate)
    if role == "reward":
        found |= {f"{section}.enable": True, f"{section}.use_reward_loop": False}
    return found if role == "reference" else found | {f"{section}.strategy": strategy}


def _tokens(work: Workload, candidate: Candidate) -> int:
    """Tokens of a packed micro-batch on one of the devices that share it: those it holds on average, or the longest."""
    mean, longest = work.prompt.mean + work.response.mean, work.prompt.maximum + work.response.maximum
    return math.ceil(max(candidate.micro_batch * mean, longest) / candidate.cp)


def _fsdp(asked: Exported, role: str, candidate: Candidate) -> dict[str, object]:
    section, config, model = {
        "actor": (ACTOR, f"{ACTOR}.fsdp_config", MODEL),
        "reference": (REF, f"{REF}.fsdp_config", ""),
        "critic": ("critic", "critic.model.fsdp_config", "critic.model"),
        "reward": ("reward_model", "reward_model.model.fsdp_config", ""),
    }[role]
    if candidate.recompute == "selective":
        raise asked.refuse(candidate.model_stage, "FSDP recomputes whole layers or none")
    found: dict[str, object] = {
        f"{section}.ulysses_sequence_parallel_size": candidate.cp,
        f"{config}.fsdp_size": 1 if candidate.zero == 0 else -1,
        f"{config}.param_offload": candidate.offload,
    }
    if model:
        found[f"{config}.optimizer_offload"] = candidate.offload
        found[f"{model}.enable_gradient_checkpointing"] = candidate.recompute == "full"
    return found


def _megatron(asked: Exported, section: str, candidate: Candidate) -> dict[str, object]:
    config, layout = f"{section}.megatron", candidate.layout
    found: dict[str, object] = {
        f"{config}.tensor_model_parallel_size": layout.tp,
        f"{config}.pipeline_model_parallel_size": layout.pp,
        f"{config}.context_parallel_size": candidate.cp,
        f"{config}.expert_model_parallel_size": candidate.ep,
        f"{config}.sequence_parallel": candidate.sequence_parallel,
        f"{config}.param_offload": candidate.offload,
        f"{config}.optimizer_offload": candidate.offload,
    }
    if candidate.vpp > 1:
        found[f"{config}.virtual_pipeline_model_parallel_size"] = candidate.vpp
    for name, value in asked.stage_keys(candidate).items():
        # A layout holds signs that Hydra would read itself.
        found[f"+{config}.{STAGES[name]}"] = f"'{value}'" if name == "layout" else value
    if candidate.recompute != "none":
        found[f"+{config}.{OVERRIDE}.recompute_granularity"] = candidate.recompute
    if candidate.recompute == "full":
        found[f"+{config}.{OVERRIDE}.recompute_method"] = "uniform"
        found[f"+{config}.{OVERRIDE}.recompute_num_layers"] = 1
    return found
