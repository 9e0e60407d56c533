"""An imported configuration as a planning problem: calls, batch, devices, what its host can do, and its own plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nereus.clusters.named import machine
from nereus.core import (
    Capabilities,
    Cluster,
    Head,
    InfeasibleError,
    Lengths,
    ModelSpec,
    ModelStage,
    Plan,
    SettingsError,
    Stage,
    Workflow,
    Workload,
    plugins,
)
from nereus.families.models import named, names
from nereus.families.models.given import given
from nereus.integrations import batch as batches
from nereus.integrations import pinned
from nereus.integrations.habits import said, used_by
from nereus.integrations.hosts import Trainer, limits
from nereus.integrations.imported import Imported, Part, Refusal, RefusedImportError
from nereus.integrations.lengths import understood

SCALAR_ROLES = ("critic", "reward")
LOGITS = {
    "eager": "logits, probabilities and gradients of a micro-batch are counted in fp32 (no fused loss is assumed)",
    "vocab_parallel": "logits of a micro-batch are counted as one fp32 buffer and a cast gradient (Megatron's loss)",
    "in_place": "logits of a micro-batch are counted once in the model's dtype: their gradient replaces them",
    "in_place_chunked": "logits of a micro-batch are counted once in the model's dtype, entropy in chunks",
    "fused": "logits of a micro-batch are never whole: its kernels fuse head and loss",
}
"""What is assumed of a loss."""
DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32", "fp32": "fp32"}
OWN_NAMES = {"ppo": ("ppo", "gae"), "grpo": ("grpo", "group_norm"), "remax": ("remax",)}
"""What frameworks call the algorithms whose calls are planned."""
ROLLOUT = ModelStage("actor", Stage.GENERATION)
USUAL_DTYPE = "bfloat16"
"""Where a file names none."""


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
    """The sizes of every role's model. `models` names them by role instead of the file; of no other use to a plan are
    their weights, so a path counts by the known name in it (`sft-qwen2.5-7b/step_300`).

    Raises RefusedImportError when neither names the actor or the dtype is unknown, SettingsError for an unknown name.
    """
    names = {**found.models, **(models or {})}
    if "actor" not in names:
        raise RefusedImportError(Refusal.NO_MODEL, f"the {found.framework} configuration names no model: give one")
    asked = found.actor.dtype or USUAL_DTYPE
    if asked not in DTYPES:
        raise RefusedImportError(
            Refusal.INVALID, f"{found.framework}: the actor's dtype {asked!r}, valid: {', '.join(DTYPES)}"
        )
    dtype = DTYPES[asked]
    return {role: _sizes(role, names.get(role, names["actor"]), dtype) for role in found.roles}


def _sizes(role: str, model: str, dtype: str) -> ModelSpec:
    head = Head.SCALAR if role in SCALAR_ROLES else Head.LM
    try:
        return given(model, dtype, head)
    except SettingsError as error:
        if Path(model).exists():
            raise
        if guess := known_in(model):
            return named(guess, dtype, head)
        raise SettingsError(f"{role}: {error}") from None


def known_in(path: str) -> str | None:
    """The longest name of a known model inside a path, letters and digits alone compared; None without one."""
    plain = re.sub(r"[^a-z0-9]", "", path.lower())
    found = [name for name in names() if re.search(rf"{_stem(name)}(?!\d)", plain)]
    return max(found, key=lambda name: len(_stem(name)), default=None)


def _stem(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower().removeprefix("meta-"))


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
    model's context and for batches that do not divide.
    """
    have = len(cluster.devices)
    if have < found.devices:
        raise InfeasibleError(f"the configuration asks for {found.devices} devices{_made_of(found)}, there are {have}")
    this = batches.step(found)
    problems = batches.inexact(found, this)
    if exact and problems:
        raise SettingsError(f"batch: exact: {'; '.join(problems)}")
    cluster = used_by(found.framework, cluster)
    lengths = understood(found, sizes["actor"], prompt, response)
    workflow = _workflow(found, sizes)
    load = batches.workload(found, this, lengths.prompt, lengths.response)
    placed, able = pinned.plan(found, workflow, load, cluster), capabilities(found, workflow)
    return ImportedJob(
        imported=found,
        workflow=workflow,
        workload=load,
        cluster=cluster,
        capabilities=able,
        plan=placed.plan,
        unplaced=placed.reason,
        assumptions=(
            *_assumed(found, lengths.assumptions, load),
            limits(f"{found.framework} with such a file", able),
        ),
        notes=(*found.notes, *lengths.notes, *this.notes, *problems, *placed.notes),
    )


def _assumed(found: Imported, lengths: Sequence[str], load: Workload) -> Iterator[str]:
    """What the file does not say and was taken to be so."""
    yield from (*_taken(found), *_renamed(found), *_guessed(found), *lengths)
    yield _padding(found)
    yield LOGITS[load.loss]
    yield from said(found.framework)


def capabilities(found: Imported, workflow: Workflow) -> Capabilities:
    """What the host of a configuration can be told to do."""
    actor = found.actor
    trainer = Trainer(found.framework, actor.backend or "", actor.zero if actor.zero is not None else 1)
    cp = (actor.cp or 1) * (actor.sp or 1)
    return trainer.capabilities(workflow, placement(found, workflow), cp, actor.tp or 1)


def placement(found: Imported, workflow: Workflow) -> str:
    """How the file places the roles: on the same devices, generation beside all others, or each as it is listed."""
    held = {ms: frozenset(pinned.devices(found, ms, tuple(range(found.devices)))) for ms in workflow.model_stages}
    generating = {devices for ms, devices in held.items() if ms.stage is Stage.GENERATION}
    others = {devices for ms, devices in held.items() if ms.stage is not Stage.GENERATION}
    if len(generating | others) == 1:
        return "colocated"
    beside = len(others) == 1 and not any(devices & one for devices in generating for one in others)
    return "disaggregated" if beside else "any"


def _made_of(found: Imported) -> str:
    if found.nodes and found.devices_per_node and found.nodes * found.devices_per_node == found.devices:
        return f" ({found.nodes} nodes x {found.devices_per_node})"
    return ""


def _guessed(found: Imported) -> list[str]:
    """Models that were recognised by a name inside theirs."""
    lines = []
    for role, model in found.models.items():
        try:
            named(model)
        except SettingsError:
            if role in found.roles and (guess := known_in(model)):
                lines.append(f"{role}: {model!r} is taken to have the sizes of {guess}")
    return lines


def _taken(found: Imported) -> list[str]:
    lines = [f"{field}: taken from {found.framework}'s default {key}" for field, key in sorted(found.defaults.items())]
    lines += [f"{line} is as if not given: nothing sets it (--var NAME=VALUE)" for line in found.unresolved]
    return lines if found.actor.dtype else [*lines, f"models compute in {USUAL_DTYPE}: the file names no dtype"]


def _padding(found: Imported) -> str:
    """What the time and memory of a micro-batch are counted for."""
    if found.batch.unpadded:
        size = "a budget of tokens" if found.batch.packed else "a fixed number of sequences"
        return f"micro-batches hold {size}, packed without padding: every token counts once"
    return "every sequence of a micro-batch is padded to the longest of them: the file does not pack them"


def _algorithm(found: Imported) -> str:
    """The algorithm of ours that runs the same models."""
    return "ppo" if "critic" in found.roles else "remax" if found.algorithm == "remax" else "grpo"


def _renamed(found: Imported) -> list[str]:
    """An algorithm that is planned as another."""
    ours = _algorithm(found)
    if found.algorithm is None or found.algorithm.lower() in OWN_NAMES[ours]:
        return []
    return [f"algorithm {found.algorithm!r} is planned as {ours}: a step of the same calls, each once over the batch"]


def _workflow(found: Imported, sizes: Mapping[str, ModelSpec]) -> Workflow:
    """The calls of the algorithm that runs the same models, without those of roles that the job does not have."""
    algorithm = plugins.make("nereus.algorithms", _algorithm(found), {"reward_model": "reward" in found.roles})
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
        precisions={ROLLOUT: "fp8"} if "fp8" in (found.rollout.dtype or "") else {},
    )


def part_of(found: Imported, model_stage: ModelStage) -> Part | None:
    """The part of the file that lays a model-stage out."""
    if model_stage.stage is Stage.GENERATION:
        return found.rollout
    return {"actor": found.actor, "reference": found.reference, "critic": found.critic, "reward": found.reward}.get(
        model_stage.model
    )
