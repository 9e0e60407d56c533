"""When each call of a step runs: the one place that says what waits for what (paper §4.2, D7.5).

A call waits for (1) the calls whose data it reads, (2) earlier calls on any of its devices, (3) earlier calls of
another stage in its partition, which runs one stage at a time. Earlier means earlier in workflow order, whatever the
times, so a step is the longest path of a fixed graph: making any call shorter never makes the step longer. The weight
synchronisation comes after everything, so that a search may add it to every path; a job starts it as soon as what it
copies is updated and its devices are free. An asynchronous job generates from the weights of the step before, so
nothing waits for generation but what needs its devices, its partition or new weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus.core import ModelStage, Plan, Stage, Workflow

SYNC = "sync"
"""The weight synchronisation that ends a step; its seconds and timings go by this name."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each call ends, and the chain of calls that makes the step as long as it is."""

    step_s: float
    ends_s: Mapping[str, float]
    critical_path: tuple[str, ...]


def node_order(workflow: Workflow) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Calls in workflow order, the weight synchronisation last, with what each waits for whatever the plan."""
    order = workflow.order()
    before: dict[str, list[str]] = {name: [] for name in order}
    for earlier, later in workflow.edges():
        if not (workflow.asynchronous and _generates(workflow, earlier) and not _generates(workflow, later)):
            before[later].append(earlier)
    if workflow.weight_syncs:
        before[SYNC] = list(order)
        order = (*order, SYNC)
    return order, {name: tuple(names) for name, names in before.items()}


def waits(workflow: Workflow, plan: Plan) -> dict[str, tuple[str, ...]]:
    """What each call waits for under a plan."""
    order, before = node_order(workflow)
    devices = {ms: plan.of(ms).devices for ms in plan.model_stages}
    home = {ms: index for index, partition in enumerate(plan.partitions) for ms in partition.model_stages}
    taking_turns = {
        (one, other): not devices[one].isdisjoint(devices[other])
        or (one.stage is not other.stage and home.get(one, -1) == home.get(other, -2))
        for one in devices
        for other in devices
    }
    who: dict[str, ModelStage] = {call.name: call.model_stage for call in workflow.calls}
    return {
        name: before[name]
        if name == SYNC
        else (
            *before[name],
            *(other for other in order[:index] if taking_turns[who[other], who[name]] and other not in before[name]),
        )
        for index, name in enumerate(order)
    }


def timeline(order: Sequence[str], waits: Mapping[str, Sequence[str]], seconds: Mapping[str, float]) -> Timeline:
    """The longest path through the calls."""
    ends: dict[str, float] = {}
    latest: dict[str, str] = {}
    for name in order:
        start = 0.0
        for other in waits[name]:
            if ends[other] > start:
                start, latest[name] = ends[other], other
        ends[name] = start + seconds[name]
    path = [max(order, key=ends.__getitem__)]
    while path[-1] in latest:
        path.append(latest[path[-1]])
    return Timeline(ends[path[0]], ends, tuple(reversed(path)))


def _generates(workflow: Workflow, name: str) -> bool:
    return workflow.call(name).model_stage.stage is Stage.GENERATION
