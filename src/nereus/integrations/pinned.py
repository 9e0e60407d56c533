"""The plan that an imported configuration is: its degrees on its devices, with what its framework accepts explained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from nereus.core import (
    Assignment,
    Candidate,
    Cluster,
    DeviceKind,
    Layout,
    ModelSpec,
    ModelStage,
    Partition,
    Plan,
    Stage,
    Work,
    Workflow,
    Workload,
)
from nereus.cost.memory import Memory, runtime_bytes, sequence_kv_bytes
from nereus.cost.ranks import Ranks
from nereus.cost.rows import Rows
from nereus.families import expert_fault
from nereus.integrations import stages
from nereus.integrations.batch import micro_batch
from nereus.integrations.imported import Imported, Part
from nereus.planning.place import place

HOST_STEPS = ("openrlhf", "slime", "roll")
"""Frameworks whose optimizer, where it is offloaded, never comes back to the devices."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A plan, or the reason why the configuration cannot run as it stands."""

    plan: Plan | None
    reason: str = ""
    notes: tuple[str, ...] = ()


class _ImpossibleError(Exception):
    """The configuration cannot run: the message is the reason."""


@dataclass(slots=True)
class _Placer:
    found: Imported
    workflow: Workflow
    workload: Workload
    cluster: Cluster
    notes: list[str] = field(default_factory=list)

    def assignment(self, model_stage: ModelStage, ids: tuple[int, ...]) -> Assignment:
        part = self.part(model_stage)
        spec = self.workflow.spec(model_stage)
        layout = self.layout(model_stage, part, spec)
        shared = (part.cp or 1) * (part.sp or 1)
        size = layout.size * shared
        dp = len(ids) // size
        if not ids:
            raise _ImpossibleError(f"{model_stage}: the file gives it no devices")
        if dp < 1:
            raise _ImpossibleError(
                f"{model_stage}: a unit of {layout} cp{shared} needs {size} devices, it has {len(ids)}"
            )
        if dp * size < len(ids):
            self.note(f"{model_stage}: {len(ids)} devices are no multiple of {size}: {len(ids) - dp * size} stay idle")
        whole = self.workload.mini_batch if self.workflow.updated(model_stage) else self.workload.sequences
        if dp > whole:
            self.note(f"{model_stage}: dp {dp} for {whole} sequences: {dp - whole} replicas have none")
            dp = whole
        candidate = self.candidate(model_stage, part, layout, dp, shared)
        return Assignment(candidate, place(candidate, [ids]))

    def part(self, model_stage: ModelStage) -> Part:
        if model_stage.stage is Stage.GENERATION:
            return self.found.rollout
        parts = {"reference": self.found.reference, "critic": self.found.critic, "reward": self.found.reward}
        return parts.get(model_stage.model) or self.found.actor

    def layout(self, model_stage: ModelStage, part: Part, spec: ModelSpec) -> Layout:
        tp, pp = part.tp or 1, part.pp or 1
        if spec.heads % tp:
            valid = [degree for degree in range(1, spec.heads + 1) if spec.heads % degree == 0 and degree <= max(tp, 8)]
            raise _ImpossibleError(
                f"{model_stage}: {spec.heads} heads on tp {tp}: valid TP {', '.join(map(str, valid))}"
            )
        if pp > spec.layers:
            raise _ImpossibleError(f"{model_stage}: pp {pp} for {spec.layers} layers")
        if spec.kv_heads % tp and not spec.kv_rank:
            self.note(f"{model_stage}: {spec.kv_heads} KV heads on tp {tp}: they are replicated, and counted so")
        layers = stage_layers(part, spec.layers)
        layout = Layout(tp, pp, layers)
        if spec.layers % pp or layers:
            counts = [len(layout.layers_of(rank, spec.layers)) for rank in range(pp)]
            self.note(f"{model_stage}: {spec.layers} layers on pp {pp}: stages of {' '.join(map(str, counts))}")
        return layout

    def candidate(self, model_stage: ModelStage, part: Part, layout: Layout, dp: int, shared: int) -> Candidate:
        spec = self.workflow.spec(model_stage)
        if part.sp and part.sp > 1:
            self.note(
                f"{model_stage}: sequence parallelism of {part.sp} is planned as context parallelism of the same degree"
            )
        offload = self.offloaded(model_stage, part)
        ep = (part.ep or 1) if spec.experts else 1
        if fault := expert_fault(spec, ep, dp, shared, layout.tp):
            raise _ImpossibleError(f"{model_stage}: {fault}")
        cut = 1 if ep > 1 else layout.tp
        if spec.experts and part.expert_tp not in (None, cut):
            self.note(
                f"{model_stage}: TP of {part.expert_tp} inside experts is not planned: at tp {layout.tp} and ep {ep} "
                f"each is cut {cut} ways here"
            )
        if model_stage.stage is Stage.GENERATION:
            return self.engine(model_stage, layout, dp, ep)
        updated = self.workflow.updated(model_stage)
        share = -(-(self.workload.mini_batch if updated else self.workload.sequences) // dp)
        tokens = self.workload.prompt.mean + self.workload.response.mean
        return Candidate(
            model_stage=model_stage,
            layout=layout,
            dp=dp,
            micro_batch=micro_batch(part, share, tokens, bool(self.found.batch.packed)),
            recompute=(part.recompute or "none") if updated else "none",
            offload=offload,
            zero=self.zero(model_stage, part),
            cp=shared,
            ep=ep,
            sequence_parallel=bool(part.sequence_parallel) and layout.tp > 1,
            vpp=part.vpp or 1,
        )

    def offloaded(self, model_stage: ModelStage, part: Part) -> bool:
        """Whether it waits in host memory, in whole or in part."""
        if part.optimizer_offload and self.found.framework in HOST_STEPS:
            self.note(
                f"{model_stage}: its optimizer steps on the host; here the state is counted as loaded for the step, "
                "which takes more memory and less time: what lacks no more than that may run"
            )
        idle = self.found.idle_offload and self.found.colocated
        return bool(part.param_offload or part.optimizer_offload or idle)

    def zero(self, model_stage: ModelStage, part: Part) -> int:
        """FSDP over one device is plain data parallelism; over some of them it is planned as over all."""
        level = part.zero or 0
        if level < 2 or part.shard in (None, -1, part.devices):
            return level
        if part.shard == 1:
            return 0
        self.note(f"{model_stage}: weights sharded over {part.shard} of {part.devices} devices are planned as over all")
        return level

    def engine(self, model_stage: ModelStage, layout: Layout, dp: int, ep: int) -> Candidate:
        """Generation: as many sequences at once as the engine's share of memory has room for beside all else."""
        share = -(-self.workload.sequences // dp)
        plain = Candidate(model_stage, layout, dp, share, offload=self.found.colocated, ep=ep)
        if self.found.kv_share is None:
            return plain
        spec = self.workflow.spec(model_stage)
        kind = self.cluster.kind(self.cluster.ids[0])
        memory = Memory(spec, False, self.workload, kind)
        one = sequence_kv_bytes(spec, layout, self.workload, (kind,))
        own = math.floor(self.found.kv_share * kind.memory_bytes)
        live = share
        # Storage of one layer's keys or values exists twice while the cache grows.
        grown = 1 + 1 / (2 * len(layout.layers_of(0, spec.layers)))
        for _ in range(2):  # what else a call needs grows with the sequences that run at once
            trial = replace(plain, micro_batch=live, kv_bytes=max(1, live * one))
            room = math.floor((own - _beside_cache(memory, trial, spec.layers)) / grown)
            live = min(share, max(1, room // one))
        if room < one:
            raise _ImpossibleError(
                f"{model_stage}: the engine's share {self.found.kv_share:g} of {kind.memory_bytes:,} bytes, less "
                f"weights and working space, leaves {max(room, 0):,} bytes: one sequence's cache needs {one:,}"
            )
        return replace(plain, micro_batch=live, kv_bytes=room)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def engine_share(workload: Workload, spec: ModelSpec, kind: DeviceKind, candidate: Candidate) -> float:
    """The share of a device that an engine is to be given for a plan's generation: all that it allocates."""
    memory = Memory(spec, False, workload, kind)
    rows, ranks = Rows.of([candidate], spec.layers, node_size=1), Ranks.every(candidate.layout, spec.layers)
    call = memory.transient(rows, ranks, Work.GENERATE)
    cache = float(np.max(call["kv cache"] + call["kv growth"]))
    return (cache + _beside_cache(memory, candidate, spec.layers)) / kind.memory_bytes


def _beside_cache(memory: Memory, candidate: Candidate, layers: int) -> int:
    """Bytes that an engine takes on its fullest pp rank beside its KV cache: engines count all that they allocate."""
    rows, ranks = Rows.of([candidate], layers, node_size=1), Ranks.every(candidate.layout, layers)
    stored = sum(memory.stored(rows, ranks).values())
    kept = sum(size for name, size in memory.resident(rows, ranks).items() if name == "communicators")
    call = memory.transient(rows, ranks, Work.GENERATE)
    others = sum(size for name, size in call.items() if name not in ("kv cache", "kv growth", "loaded state"))
    return math.ceil(np.max(stored + kept + others)) + runtime_bytes(memory.kind)


def stage_layers(part: Part, layers: int) -> tuple[int, ...] | None:
    """Layers of each pp rank where the file gives the first or the last; the others share the rest evenly."""
    pp, first, last = part.pp or 1, part.first_stage_layers, part.last_stage_layers
    if part.pipeline_layout:
        return _laid_out(part.pipeline_layout, pp * (part.vpp or 1), pp, layers)
    if pp == 1 or (first is None and last is None):
        return None
    open_ranks = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < open_ranks or (open_ranks == 0 and rest):
        raise _ImpossibleError(
            f"stages of {first} first and {last} last layers leave {rest} of {layers} for {open_ranks} more"
        )
    small, extra = divmod(rest, open_ranks) if open_ranks else (0, 0)
    middle = [small + (i < extra) for i in range(open_ranks)]
    return (*(() if first is None else (first,)), *middle, *(() if last is None else (last,)))


def _laid_out(text: str, chunks: int, pp: int, layers: int) -> tuple[int, ...]:
    """Layers of each pp rank of a pipeline layout; chunk i of an interleaved one lies on rank i mod pp."""
    try:
        found = stages.counts(text)
    except ValueError:
        raise _ImpossibleError(f"the pipeline layout {text!r} cannot be read") from None
    if len(found) % pp or sum(found) != layers or (chunks > pp and len(found) != chunks):
        raise _ImpossibleError(
            f"the pipeline layout {text!r} has {len(found)} stages with {sum(found)} layers, the model has {layers} "
            f"layers on pp {pp}"
        )
    return tuple(sum(found[rank::pp]) for rank in range(pp))


def plan(found: Imported, workflow: Workflow, workload: Workload, cluster: Cluster) -> Placed:
    """The configuration's own plan on the first of the cluster's devices."""
    placer = _Placer(found, workflow, workload, cluster)
    try:
        ids = {ms: devices(found, ms, cluster.ids) for ms in workflow.model_stages}
        assignments = tuple(placer.assignment(ms, ids[ms]) for ms in workflow.model_stages)
    except _ImpossibleError as error:
        return Placed(None, str(error), tuple(placer.notes))
    return Placed(Plan(assignments, _partitions(assignments)), notes=tuple(placer.notes))


def devices(found: Imported, model_stage: ModelStage, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The devices of a model-stage: as the file lists them, else training first and generation behind it."""
    names = {"actor": "actor_infer" if model_stage.stage is Stage.GENERATION else "actor_train"}
    listed = found.device_lists.get(names.get(model_stage.model, model_stage.model))
    if listed:
        return tuple(ids[index] for index in listed)
    if model_stage.stage is Stage.GENERATION and not found.colocated:
        return ids[found.devices - (found.rollout.devices or 0) : found.devices]
    if model_stage.stage is Stage.GENERATION:
        return ids[: found.rollout.devices or found.devices]
    return ids[: found.actor.devices or found.devices]


def _partitions(assignments: tuple[Assignment, ...]) -> tuple[Partition, ...]:
    """Model-stages that share devices, directly or through others, have one partition."""
    groups: list[tuple[set[ModelStage], set[int]]] = []
    for assignment in assignments:
        stages, held = {assignment.candidate.model_stage}, set(assignment.devices)
        for group in [group for group in groups if group[1] & held]:
            groups.remove(group)
            stages |= group[0]
            held |= group[1]
        groups.append((stages, held))
    return tuple(Partition(frozenset(stages), frozenset(held)) for stages, held in groups)
