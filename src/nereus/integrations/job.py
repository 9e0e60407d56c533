"""An imported configuration as a planning problem: calls, batch, devices, what its host can do, and its own plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nereus.clusters.named import machine
from nereus.core import (
    Capabilities,
    Cluster,
    Head,
    InfeasibleError,
    Lengths,
    ModelSpec,
    ModelStage,
    Pin,
    Plan,
    SettingsError,
    Stage,
    Workflow,
    Workload,
    plugins,
)
from nereus.families.models import named
from nereus.integrations import batch as batches
from nereus.integrations import pinned
from nereus.integrations.imported import Imported, Part, Refusal, RefusedImportError

SCALAR_ROLES = ("critic", "reward")
DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32", "fp32": "fp32"}


@dataclass(frozen=True, slots=True)
class ImportedJob:
    """What is planned for. `plan` is the configuration itself, None where `unplaced` says why it cannot run."""

    imported: Imported
    workflow: Workflow
    workload: Workload
    cluster: Cluster
    capabilities: Capabilities
    plan: Plan | None
    unplaced: str = ""
    assumptions: tuple[str, ...] = ()
    """What the file does not say and was taken to be so."""
    notes: tuple[str, ...] = ()
    """What the framework accepts and how it is understood here."""


def pool(found: Imported, kind: str, nodes: int | None = None) -> Cluster:
    """Machines of a type (`h200x8`, `h200`) for a configuration: as many as it needs, or `nodes` of them.

    The configuration's own devices a node are taken where the type's name gives no other number.
    """
    named_size = kind.rpartition("x")[2].isdecimal()
    each = found.devices_per_node
    try:
        one = machine(f"{kind}x{each}" if each and not named_size else kind, 1)
    except SettingsError:
        one = machine(kind, 1)  # the type's nodes are smaller: as many as are needed
    size = len(one.devices)
    wanted = nodes or max(1, -(-found.devices // size))
    return machine(f"{kind}x{size}" if not named_size else kind, wanted)


def specs(found: Imported, models: Mapping[str, str] | None = None) -> dict[str, ModelSpec]:
    """The sizes of every role's model. `models` names them by role instead of the file.

    Raises RefusedImportError when neither names the actor, SettingsError for an unknown name.
    """
    names = {**found.models, **(models or {})}
    if "actor" not in names:
        raise RefusedImportError(Refusal.NO_MODEL, f"the {found.framework} configuration names no model: give one")
    dtype = DTYPES.get(found.actor.dtype or "bfloat16", "bf16")
    return {role: _sizes(role, names.get(role, names["actor"]), dtype) for role in found.roles}


def _sizes(role: str, model: str, dtype: str) -> ModelSpec:
    try:
        return named(model, dtype, Head.SCALAR if role in SCALAR_ROLES else Head.LM)
    except SettingsError as error:
        raise SettingsError(f"{role}: {error}") from None


def build(
    found: Imported,
    cluster: Cluster,
    sizes: Mapping[str, ModelSpec],
    prompt: Lengths | None = None,
    response: Lengths | None = None,
    exact: bool = False,
) -> ImportedJob:
    """The planning problem of a configuration on a cluster. `exact`: the batch must divide as the framework asks.

    Raises InfeasibleError when the cluster is smaller than the configuration, SettingsError for lengths beyond the
    model's context, for lengths that neither the file nor the caller gives, and for batches that do not divide.
    """
    have = len(cluster.devices)
    if have < found.devices:
        raise InfeasibleError(f"the configuration asks for {found.devices} devices{_made_of(found)}, there are {have}")
    this = batches.step(found)
    problems = batches.inexact(found, this)
    if exact and problems:
        raise SettingsError(f"batch: exact: {'; '.join(problems)}")
    prompt, response, assumptions = _lengths(found, prompt, response)
    workflow = _workflow(found, sizes)
    _check_context(found, sizes["actor"], prompt, response)
    load = batches.workload(found, this, prompt, response)
    placed = pinned.plan(found, workflow, load, cluster)
    return ImportedJob(
        imported=found,
        workflow=workflow,
        workload=load,
        cluster=cluster,
        capabilities=capabilities(found, workflow),
        plan=placed.plan,
        unplaced=placed.reason,
        assumptions=(*_taken(found), *assumptions),
        notes=(*found.notes, *this.notes, *problems, *placed.notes),
    )


def capabilities(found: Imported, workflow: Workflow) -> Capabilities:
    """What the host of a configuration can be told to do: FSDP and DeepSpeed shard, Megatron cuts."""
    actor = found.actor
    cut = actor.backend is not None and ("megatron" in actor.backend or "dtensor" in actor.backend)
    pins = {}
    if not cut:
        pins = {ms: Pin(tp=1, pp=1) for ms in workflow.model_stages if ms.stage is not Stage.GENERATION}
    return Capabilities(
        recompute=("none", "selective", "full") if cut else ("none", "full"),
        zero=(actor.zero if actor.zero is not None else 1,),
        expert_parallel=cut and workflow.specs["actor"].experts > 0,
        cp=tuple(sorted({1, (actor.cp or 1) * (actor.sp or 1)})),
        sequence_parallel=bool(actor.sequence_parallel),
        offload=bool(found.idle_offload or actor.param_offload or actor.optimizer_offload),
        uneven_shares=False,
        asynchronous=found.asynchronous,
        pins=pins,
    )


def _made_of(found: Imported) -> str:
    if found.nodes and found.devices_per_node and found.nodes * found.devices_per_node == found.devices:
        return f" ({found.nodes} nodes x {found.devices_per_node})"
    return ""


def _taken(found: Imported) -> list[str]:
    return [f"{field}: taken from {found.framework}'s default {key}" for field, key in sorted(found.defaults.items())]


def _lengths(
    found: Imported, prompt: Lengths | None, response: Lengths | None
) -> tuple[Lengths, Lengths, tuple[str, ...]]:
    """Lengths as given; where they are not, every sequence is as long as the file allows."""
    batch = found.batch
    assumptions = []
    whole = batch.max_sequence_tokens
    if response is None:
        longest = batch.max_response_tokens or (whole - int(prompt.maximum) if whole and prompt else None) or whole
        if longest is None or longest < 1:
            raise SettingsError(f"the {found.framework} configuration bounds no response: give the response's tokens")
        response = Lengths.constant(longest)
        assumptions.append(f"every response has {longest} tokens, the most that the file allows: give the mean")
    if prompt is None:
        left = whole - int(response.maximum) if whole else None
        longest = batch.max_prompt_tokens or (left if left and left > 0 else None)
        if longest is None or longest < 1:
            raise SettingsError(f"the {found.framework} configuration bounds no prompt: give the prompt's tokens")
        prompt = Lengths.constant(longest)
        assumptions.append(f"every prompt has {longest} tokens, the most that the file allows: give the mean")
    if whole and prompt.maximum + response.maximum > whole:
        shorter = max(1.0, whole - prompt.maximum)
        if shorter < response.maximum and prompt.maximum < whole:
            response = _capped(response, shorter)
            assumptions.append(f"prompt and response together have at most {whole} tokens")
        else:
            prompt = _capped(prompt, max(1.0, whole - response.maximum))
            assumptions.append(f"prompt and response together have at most {whole} tokens")
    return prompt, response, tuple(assumptions)


def _capped(lengths: Lengths, maximum: float) -> Lengths:
    return Lengths(
        min(lengths.mean, maximum),
        min(lengths.p95, maximum),
        maximum,
        tuple(min(quantile, maximum) for quantile in lengths.quantiles),
    )


def _check_context(found: Imported, spec: ModelSpec, prompt: Lengths, response: Lengths) -> None:
    context = max(spec.max_positions, found.context_tokens or 0)
    if prompt.maximum + response.maximum > context:
        raise SettingsError(
            f"prompt {prompt.maximum:.0f} + response {response.maximum:.0f} tokens are beyond the model's context of "
            f"{context}: shorten one, or give the model a longer context"
        )


def _workflow(found: Imported, sizes: Mapping[str, ModelSpec]) -> Workflow:
    """The calls of the algorithm that runs the same models, without those of roles that the job does not have."""
    name = "ppo" if "critic" in found.roles else "remax" if found.algorithm == "remax" else "grpo"
    algorithm = plugins.make("nereus.algorithms", name, {"reward_model": "reward" in found.roles})
    whole: Workflow = algorithm.workflow({**{role: sizes["actor"] for role in algorithm.models()}, **sizes})
    calls = tuple(call for call in whole.calls if call.model_stage.model in found.roles)
    written = {column for call in calls for column in call.writes}
    started = {column for call in whole.calls for column in call.reads} - {c for k in whole.calls for c in k.writes}
    kept = tuple(replace(c, reads=tuple(r for r in c.reads if r in written | started)) for c in calls)
    return replace(
        whole,
        calls=kept,
        specs={role: sizes[role] for role in found.roles},
        asynchronous=found.asynchronous,
    )


def part_of(found: Imported, model_stage: ModelStage) -> Part | None:
    """The part of the file that lays a model-stage out."""
    if model_stage.stage is Stage.GENERATION:
        return found.rollout
    return {"actor": found.actor, "reference": found.reference, "critic": found.critic, "reward": found.reward}.get(
        model_stage.model
    )
