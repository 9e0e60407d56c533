"""A plan as rows to show: what terminal tables, the page and the JSON have in common. Equal devices are one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.core import Estimate, ModelStage, Plan
from nereus.core.sizes import show_seconds
from nereus.cost.peaks import Peak
from nereus.cost.schedule import SYNC
from nereus.cost.step import StepModel
from nereus.planning.judge import Scored
from nereus.planning.problem import Problem
from nereus.report import devices

CLASSES = {
    "prefill": "reading prompts",
    "decode": "decoding tokens",
    "forward": "forward passes",
    "backward": "backward passes",
    "optimizer": "the optimizer",
    "tp": "tensor-parallel communication",
    "pp": "pipeline bubbles and sends",
    "dp": "gradient synchronisation",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "sync": "weight synchronisation",
    "dispatch": "host overhead of every token or call",
    "offload": "moving state to and from the host",
}
"""Operation classes in words."""


@dataclass(frozen=True, slots=True)
class StageView:
    """One model-stage: its layout, where it runs, its seconds in a step, and the bytes of its fullest device."""

    model_stage: str
    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    vpp: int
    zero: int
    micro_batch: int
    recompute: str
    kv_bytes: int
    offload: bool
    sequence_parallel: bool
    devices: int
    where: str
    partition: int
    """Which part of the pool; model-stages of one partition take turns by stage."""
    seconds: float
    stored_bytes: int
    """Kept between its calls."""
    added_bytes: int
    """The most that one of its calls adds."""


@dataclass(frozen=True, slots=True)
class CallView:
    """One call of the step. `classes` are its seconds by operation class."""

    call: str
    model_stage: str
    start_s: float
    end_s: float
    critical: bool
    classes: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Devices with equal peaks. `stored` is by model-stage, `added` by term of the call that makes the peak."""

    where: str
    count: int
    kind: str
    peak_bytes: int
    usable_bytes: int
    capacity_bytes: int
    stored: Mapping[str, int]
    call: str
    added: Mapping[str, int]

    @property
    def share(self) -> float:
        """Of what a plan may use."""
        return self.peak_bytes / self.usable_bytes


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan with everything that is shown of it."""

    plan: Plan
    step_s: float
    uncertainty: float
    stages: tuple[StageView, ...]
    calls: tuple[CallView, ...]
    memory: tuple[MemoryView, ...]
    limited_by: str

    @classmethod
    def of(cls, problem: Problem, model: StepModel, scored: Scored) -> PlanView:
        """What is shown of a plan. `model` is the problem's, so that what the search priced is not priced again."""
        plan, estimate = scored.plan, scored.estimate
        calls = _calls(model, plan, estimate)
        return cls(
            plan,
            estimate.step_s,
            estimate.uncertainty,
            tuple(_stage(problem, model, plan, ms, calls) for ms in plan.model_stages),
            calls,
            _memory(problem, model, plan),
            limited_by(calls, estimate.step_s),
        )


def limited_by(calls: tuple[CallView, ...], step_s: float) -> str:
    """The call that takes most of the critical path, and what that call spends its time on."""
    longest = max((call for call in calls if call.critical), key=lambda call: call.seconds)
    seconds = f"{show_seconds(longest.seconds)} of {show_seconds(step_s)} s"
    text = f"{longest.call} takes {seconds} ({longest.seconds / step_s:.0%})"
    if not longest.classes:
        return text
    name = max(longest.classes, key=longest.classes.__getitem__)
    share = longest.classes[name] / max(sum(longest.classes.values()), 1e-12)
    return f"{text}, {share:.0%} of it {CLASSES.get(name, name)}"


def _calls(model: StepModel, plan: Plan, estimate: Estimate) -> tuple[CallView, ...]:
    line, classes = model.timeline(plan), _classes(model, plan)
    stages = {call.name: str(call.model_stage) for call in model.workflow.calls}
    found = (
        CallView(
            name,
            stages.get(name, "actor weights"),
            max(line.ends_s[name] - seconds, 0.0),
            line.ends_s[name],
            name in line.critical_path,
            classes.get(name, {}),
        )
        for name, seconds in estimate.call_s.items()
    )
    return tuple(sorted(found, key=lambda call: (call.start_s, call.end_s)))


def _classes(model: StepModel, plan: Plan) -> dict[str, dict[str, float]]:
    """Predicted seconds by call and operation class."""
    found: dict[str, dict[str, float]] = {}
    for assignment in plan.assignments:
        for call, cost in model.costs(assignment).items():
            mine = found.setdefault(call, {})
            for name, seconds in cost.class_s.items():
                mine[name] = mine.get(name, 0.0) + seconds
    return found


def _stage(
    problem: Problem, model: StepModel, plan: Plan, model_stage: ModelStage, calls: tuple[CallView, ...]
) -> StageView:
    assignment = plan.of(model_stage)
    c, held = assignment.candidate, model.footprints(assignment)
    partitions = [index for index, part in enumerate(plan.partitions) if model_stage in part.model_stages]
    added = [sum(terms.values()) for rank in held for terms in rank.added.values()]
    return StageView(
        model_stage=str(model_stage),
        tp=c.layout.tp,
        pp=c.layout.pp,
        dp=c.dp,
        cp=c.cp,
        ep=c.ep,
        vpp=c.vpp,
        zero=c.zero,
        micro_batch=c.micro_batch,
        recompute=c.recompute,
        kv_bytes=c.kv_bytes,
        offload=c.offload,
        sequence_parallel=c.sequence_parallel,
        devices=c.devices,
        where=devices.units(assignment, problem.cluster),
        partition=partitions[0] if partitions else 0,
        seconds=sum(call.seconds for call in calls if call.model_stage == str(model_stage) and call.call != SYNC),
        stored_bytes=max(rank.resident_bytes for rank in held),
        added_bytes=max(added, default=0),
    )


def _memory(problem: Problem, model: StepModel, plan: Plan) -> tuple[MemoryView, ...]:
    """Groups of devices with the same peak on the same kind, the fullest first."""
    kinds = {device.id: device.kind for device in problem.cluster.devices}
    groups: dict[tuple[Peak | int, str], list[int]] = {}
    peaks = model.peaks(plan)
    for device, peak in peaks.items():
        groups.setdefault((id(peak), kinds[device]), []).append(device)
    found = []
    for (_, name), members in groups.items():
        peak, kind = peaks[members[0]], problem.cluster.kinds[name]
        found.append(
            MemoryView(
                where=devices.where(members, problem.cluster),
                count=len(members),
                kind=name,
                peak_bytes=peak.bytes,
                usable_bytes=problem.usable(name),
                capacity_bytes=kind.memory_bytes,
                stored=_stored(model, plan, members[0]),
                call=peak.call,
                added=dict(peak.terms),
            )
        )
    return tuple(sorted(found, key=lambda row: -row.share))


def _stored(model: StepModel, plan: Plan, device: int) -> dict[str, int]:
    """What each model-stage keeps on a device."""
    found = {}
    for assignment in plan.assignments:
        if device not in assignment.devices:
            continue
        unit = next(unit for unit in assignment.units if device in unit)
        per_rank = len(unit) // assignment.candidate.layout.pp
        rank = unit.index(device) // per_rank
        found[str(assignment.candidate.model_stage)] = model.footprints(assignment)[rank].resident_bytes
    return found
