"""Flags of OpenRLHF's `train_ppo_ray` that realise a plan. Names as in `config`."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.core import Candidate, Stage
from nereus.integrations.export import Exported

FLAGS = {"actor": "actor", "reference": "ref", "critic": "critic", "reward": "reward"}


def lines(asked: Exported) -> list[str]:
    """Every flag, devices first."""
    roles = _roles(asked)
    for role, candidate in roles.items():
        _check(asked, role, candidate)
    actor = roles["actor"]
    return [*_pools(asked, roles), *_engine(asked), *_batch(asked, roles), *_training(actor), *_waiting(roles)]


def _roles(asked: Exported) -> dict[str, Candidate]:
    actor = asked.of("actor", Stage.TRAINING)
    if actor is None or asked.of("actor", Stage.GENERATION) is None:
        raise asked.refuse("actor", "it must both generate and train")
    found = {
        "actor": actor,
        "reference": asked.of("reference", Stage.INFERENCE),
        "critic": asked.of("critic", Stage.TRAINING),
        "reward": asked.of("reward", Stage.INFERENCE),
    }
    return {role: candidate for role, candidate in found.items() if candidate}


def _check(asked: Exported, role: str, candidate: Candidate) -> None:
    """DeepSpeed shards; every role has the actor's degrees."""
    if candidate.layout.pp > 1 or candidate.ep > 1:
        raise asked.refuse(candidate.model_stage, "DeepSpeed has no pipeline and no expert parallelism here")
    if candidate.recompute == "selective":
        raise asked.refuse(candidate.model_stage, "it recomputes whole layers or none")
    asked.whole_shares(candidate, updated=role in ("actor", "critic"))
    actor = asked.of("actor", Stage.TRAINING)
    assert actor is not None
    for name, mine, its in (("tp", candidate.layout.tp, actor.layout.tp), ("cp", candidate.cp, actor.cp)):
        if mine != its:
            raise asked.refuse(candidate.model_stage, f"{name} {mine}, the actor has {its}: all roles have the same")
    if role == "critic" and (candidate.micro_batch, candidate.recompute) != (actor.micro_batch, actor.recompute):
        micro = min(candidate.micro_batch, actor.micro_batch)
        recompute = "full" if "full" in (candidate.recompute, actor.recompute) else "none"
        raise asked.refuse(
            candidate.model_stage,
            f"micro-batch {candidate.micro_batch} and recompute {candidate.recompute}, the actor has "
            f"{actor.micro_batch} and {actor.recompute}: one flag sets both; what fits both is micro-batch {micro} "
            f"with recompute {recompute}",
        )


def _pools(asked: Exported, roles: Mapping[str, Candidate]) -> list[str]:
    held = {role: asked.devices(candidate.model_stage) for role, candidate in roles.items()}
    found = []
    for role, devices in held.items():
        nodes, each = asked.grid(devices, roles[role].model_stage)
        found += [f"--{FLAGS[role]}.num_nodes {nodes}", f"--{FLAGS[role]}.num_gpus_per_node {each}"]
    generation = asked.of("actor", Stage.GENERATION)
    assert generation is not None
    generating = asked.devices(generation.model_stage)
    if all(devices == generating for devices in held.values()):
        # Plans free the cache when generation ends; engines that do not sleep keep it.
        return [*found, "--train.colocate_all", "--vllm.enable_sleep"]
    pairs = {
        ("actor", "reference"): "--train.colocate_actor_ref",
        ("critic", "reward"): "--train.colocate_critic_reward",
    }
    names = [*held, "generation"]
    sets = {**held, "generation": generating}
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            if not sets[one] & sets[other]:
                continue
            if (one, other) not in pairs or sets[one] != sets[other]:
                raise asked.refuse(
                    f"{one} and {other}",
                    "they share devices: all roles may, or actor with reference, critic with reward",
                )
            found.append(pairs[one, other])
    return found


def _engine(asked: Exported) -> list[str]:
    candidate = asked.of("actor", Stage.GENERATION)
    assert candidate is not None
    if candidate.layout.pp > 1:
        raise asked.refuse(candidate.model_stage, "its vLLM engines have no pipeline")
    asked.whole_shares(candidate, updated=False)
    return [
        f"--vllm.num_engines {candidate.dp}",
        f"--vllm.tensor_parallel_size {candidate.layout.tp}",
        f"--vllm.gpu_memory_utilization {asked.engine_share(candidate)}",
    ]


def _batch(asked: Exported, roles: Mapping[str, Candidate]) -> list[str]:
    work = asked.workload
    found = [
        f"--rollout.batch_size {work.prompts}",
        f"--rollout.n_samples_per_prompt {work.samples_per_prompt}",
        f"--train.batch_size {work.mini_batch}",
        f"--train.max_epochs {work.epochs}",
        f"--data.max_len {int(work.prompt.maximum) + work.max_response_tokens}",
        f"--rollout.max_new_tokens {work.max_response_tokens}",
        f"--train.micro_batch_size {roles['actor'].micro_batch}",
    ]
    if work.packed or roles["actor"].cp > 1:  # ring attention packs, whether it is told or not
        found.append("--ds.packing_samples")
    if "reference" in roles:
        found.append(f"--rollout.micro_batch_size {roles['reference'].micro_batch}")
    else:
        found.append("--algo.kl.init_coef 0")
    greedy = any(call.name == "generate_greedy" for call in asked.workflow.calls)
    if greedy:
        raise asked.refuse("generate_greedy", "it has no greedy baseline (ReMax)")
    return [*found, f"--algo.advantage.estimator {'gae' if 'critic' in roles else 'group_norm'}"]


def _training(actor: Candidate) -> list[str]:
    found = [f"--ds.zero_stage {actor.zero}", f"--ds.tensor_parallel_size {actor.layout.tp}"]
    found.append(f"--ds.ring_attn_size {actor.cp}")
    if actor.recompute == "full":
        found.append("--actor.gradient_checkpointing_enable")
    return found


def _waiting(roles: Mapping[str, Candidate]) -> list[str]:
    """What lies in host memory while it is idle: each scoring model by itself, those that train together."""
    found = [f"--{FLAGS[role]}.offload" for role in ("reference", "reward") if role in roles and roles[role].offload]
    if any(roles[role].offload for role in ("actor", "critic") if role in roles):
        found.append("--ds.enable_sleep")
    return found
