"""The fastest choices by trying everything: every row of every model-stage, every way to share the pool.

Written apart from the planner: partitions and groups are listed from first principles, a step is played call by call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from nereus.core import ModelStage, Stage, Workflow

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One candidate: what it is called, what it needs, seconds by call, and its part of the synchronisation."""

    name: int
    slots: int
    resident: float
    transient: float
    call_s: Mapping[str, float]
    sync_s: float


Home = Mapping[ModelStage, tuple[int, int]]
"""Partition and group of each model-stage; groups are numbered within a partition and stage."""


def homes(model_stages: Sequence[ModelStage], few: int = 6) -> Iterator[Home]:
    """Every way to share the pool that the planner claims to look at."""
    stages = {ms.stage for ms in model_stages}
    for partition in _numberings(len(model_stages), 3):
        parts = {(ms.stage, p) for ms, p in zip(model_stages, partition, strict=True)}
        if len(parts) > len(stages) and not (max(partition) <= 1 and len(model_stages) <= few):
            continue
        rooms: dict[tuple[int, object], list[ModelStage]] = {}
        for ms, p in zip(model_stages, partition, strict=True):
            rooms.setdefault((p, ms.stage), []).append(ms)
        for groups in product(*(tuple(_numberings(len(members), len(members))) for members in rooms.values())):
            yield {
                ms: (p, group)
                for ((p, _), members), numbers in zip(rooms.items(), groups, strict=True)
                for ms, group in zip(members, numbers, strict=True)
            }


def _numberings(count: int, most: int, used: int = 0) -> Iterator[tuple[int, ...]]:
    """Every way to deal `count` things to up to `most` heaps, each way once: heaps are numbered as they appear."""
    if not count:
        yield ()
        return
    for number in range(min(used + 1, most)):
        for rest in _numberings(count - 1, most, max(used, number + 1)):
            yield (number, *rest)


def data_edges(workflow: Workflow) -> set[tuple[str, str]]:
    """Calls that wait for each other's data; asynchronous jobs work on what was generated in the step before."""
    generates = {call.name for call in workflow.calls if call.model_stage.stage is Stage.GENERATION}
    edges = set(workflow.edges())
    return {(a, b) for a, b in edges if a not in generates or b in generates} if workflow.asynchronous else edges


Choices = Mapping[ModelStage, Mapping[str, Array]]
"""Columns of every choice: by model-stage what its row is called, needs and takes."""


def step_s(workflow: Workflow, home: Home, chosen: Choices) -> Array:
    """Play a step: a call starts when its data is there and whoever has its turn before it is done."""
    ends: dict[str, Array] = {}
    data = data_edges(workflow)
    owner = {call.name: call.model_stage for call in workflow.calls}
    for name in workflow.order():
        mine = owner[name]
        start: Array = np.array(0.0)
        for other, end in ends.items():
            its = owner[other]
            same_devices = its.stage is mine.stage and home[its] == home[mine]
            next_stage = its.stage is not mine.stage and home[its][0] == home[mine][0]
            if (other, name) in data or same_devices or next_stage:
                start = np.maximum(start, end)
        ends[name] = start + chosen[mine][name]
    return np.asarray(np.maximum.reduce(list(ends.values())) + sum(row["sync"] for row in chosen.values()))


def fits(home: Home, chosen: Choices, slots: int, room: float) -> NDArray[np.bool_]:
    """Which choices have the slots and the bytes."""
    used: Array = np.array(0.0)
    ok: NDArray[np.bool_] = np.array(True)
    for partition in {p for p, _ in home.values()}:
        inside = [ms for ms, (p, _) in home.items() if p == partition]
        widest, stored = np.array(0.0), np.array(0.0)
        for stage in {ms.stage for ms in inside}:
            groups: dict[int, list[ModelStage]] = {}
            for ms in inside:
                if ms.stage is stage:
                    groups.setdefault(home[ms][1], []).append(ms)
            needs = [np.maximum.reduce([chosen[ms]["slots"] for ms in group]) for group in groups.values()]
            widest = np.maximum(widest, sum(needs))
            stays = [sum(chosen[ms]["resident"] for ms in group) for group in groups.values()]
            stored = stored + np.max(np.array(stays), axis=0)
        added = np.maximum.reduce([chosen[ms]["transient"] for ms in inside])
        ok, used = ok & (stored + added <= room), used + widest
    return np.asarray(ok & (used <= slots))


def fastest(
    workflow: Workflow, rows: Mapping[ModelStage, Sequence[Row]], slots: int, room: float
) -> dict[tuple[int, ...], float]:
    """Seconds of the fastest choice of each combination of names."""
    model_stages = workflow.model_stages
    choices = list(product(*(range(len(rows[ms])) for ms in model_stages)))
    chosen: dict[ModelStage, dict[str, Array]] = {}
    for ms, column in zip(model_stages, np.array(choices).T, strict=True):
        each = [
            {"slots": row.slots, "resident": row.resident, "transient": row.transient, "sync": row.sync_s, **row.call_s}
            for row in rows[ms]
        ]
        chosen[ms] = {key: np.array([row[key] for row in each], dtype=np.float64)[column] for key in each[0]}
    best: Array = np.full(len(choices), np.inf)
    for home in homes(model_stages):
        best = np.minimum(best, np.where(fits(home, chosen, slots, room), step_s(workflow, home, chosen), np.inf))
    found: dict[tuple[int, ...], float] = {}
    for choice, seconds in zip(choices, best.tolist(), strict=True):
        name = tuple(rows[ms][index].name for ms, index in zip(model_stages, choice, strict=True))
        if seconds < found.get(name, np.inf):
            found[name] = seconds
    return found
