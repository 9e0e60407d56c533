"""A plan in another framework's words: the overrides that realise it, or the reason why the framework cannot."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from importlib import import_module

from nereus.core import (
    Candidate,
    Cluster,
    InfeasibleError,
    ModelSpec,
    ModelStage,
    Plan,
    SettingsError,
    Stage,
    Workflow,
    Workload,
)
from nereus.integrations import stages
from nereus.integrations.pinned import engine_share

FRAMEWORKS = ("verl", "openrlhf", "megatron")
MOST_SHARE = 0.95
"""Of a device's memory: beyond it an engine has no room for what it does not count."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What is to be written in another framework's words."""

    framework: str
    plan: Plan
    workflow: Workflow
    workload: Workload
    cluster: Cluster

    def of(self, model: str, stage: Stage) -> Candidate | None:
        """How a model-stage runs; None where the plan has none."""
        model_stage = ModelStage(model, stage)
        return self.plan.of(model_stage).candidate if model_stage in self.plan.model_stages else None

    def devices(self, model_stage: ModelStage) -> frozenset[int]:
        """The devices of a model-stage."""
        return self.plan.of(model_stage).devices

    def spec(self, candidate: Candidate) -> ModelSpec:
        """The sizes of a candidate's model."""
        return self.workflow.spec(candidate.model_stage)

    def refuse(self, what: object, reason: str) -> InfeasibleError:
        """The refusal of a plan that the framework cannot express."""
        return InfeasibleError(f"{self.framework} cannot run this plan: {what}: {reason}")

    def grid(self, devices: frozenset[int], what: object) -> tuple[int, int]:
        """(nodes, devices of each): the framework takes whole nodes of one size."""
        node_of = {device.id: device.node for device in self.cluster.devices}
        held: dict[object, int] = {}
        for device in devices:
            held[node_of[device]] = held.get(node_of[device], 0) + 1
        sizes = sorted(set(held.values()))
        if len(sizes) > 1:
            raise self.refuse(
                what, f"it has {' and '.join(map(str, sizes))} devices of different nodes, all must be equal"
            )
        return len(held), sizes[0]

    def whole_shares(self, candidate: Candidate, updated: bool) -> None:
        """Frameworks give every replica the same share, in whole micro-batches."""
        whole = self.workload.mini_batch if updated else self.workload.sequences
        if whole % candidate.dp:
            raise self.refuse(candidate.model_stage, f"dp {candidate.dp} does not divide {whole} sequences")

    def engine_share(self, candidate: Candidate) -> float:
        """The part of its device's memory that an engine is given, in thousandths: all that it allocates."""
        kinds = [self.cluster.kind(device) for device in self.devices(candidate.model_stage)]
        least = min(kinds, key=lambda kind: kind.memory_bytes)
        share = engine_share(self.workload, self.spec(candidate), least, candidate)
        if share > MOST_SHARE:
            raise self.refuse(
                candidate.model_stage,
                f"its weights, cache and working space are {share:.0%} of a {least.name}, an engine takes at most "
                f"{MOST_SHARE:.0%}: plan with a smaller KV budget",
            )
        return math.ceil(share * 1000) / 1000

    def uneven(self, candidate: Candidate) -> tuple[int, ...]:
        """Layers of each pp rank."""
        layers, layout = self.spec(candidate).layers, candidate.layout
        return tuple(len(layout.layers_of(rank, layers)) for rank in range(layout.pp))

    def stage_keys(self, candidate: Candidate) -> dict[str, str]:
        """`first`, `last` or `layout` where the stages are not even."""
        counts = self.uneven(candidate)
        found = stages.ends(counts)
        if found is None:
            if candidate.vpp > 1:
                raise self.refuse(candidate.model_stage, f"stages of {counts} layers cannot be interleaved")
            return {"layout": stages.layout(counts)}
        return {name: str(count) for name, count in zip(("first", "last"), found, strict=True) if count is not None}


def overrides(framework: str, plan: Plan, workflow: Workflow, workload: Workload, cluster: Cluster) -> list[str]:
    """The lines that realise a plan, one key or flag each. Raises InfeasibleError when the framework cannot run it."""
    if framework not in FRAMEWORKS:
        near = difflib.get_close_matches(framework, FRAMEWORKS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"export to {framework!r} is unknown, valid: {', '.join(FRAMEWORKS)}{hint}")
    module = import_module(f"nereus.integrations.{framework}.export")
    fp = [a.candidate for a in plan.assignments if a.candidate.precision]
    asked = Exported(framework, plan, workflow, workload, cluster)
    if fp:
        raise asked.refuse(fp[0].model_stage, f"its precision {fp[0].precision} has no override here")
    lines: list[str] = module.lines(asked)
    return lines + [
        f"# {model_stage} is planned in {precision}: no override here says so, your own configuration has to"
        for model_stage, precision in workflow.precisions.items()
    ]


def unknown_keys(framework: str, lines: list[str]) -> tuple[str, ...] | None:
    """Keys of `overrides` that the installed framework's own schema lacks; None when it is not installed."""
    from nereus.integrations import schema

    known = schema.keys(framework)
    if known is None:
        return None
    keys = [line.lstrip("+").partition("=")[0].split(" ")[0] for line in lines if not line.startswith("#")]
    free = tuple(prefix for prefix in schema.FREE.get(framework, ()))
    return tuple(key for key in keys if key not in known and not key.startswith(free))
