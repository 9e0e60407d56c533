"""When each call of a step runs: data edges, and calls that share a device take turns (paper §4.2).

Turns are taken in workflow order whatever the times, so a step is the longest path of a fixed graph: making any call
shorter never makes the step longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nereus.core import Workflow

SYNC = "sync"
"""The weight synchronisation that ends a step; its seconds and timings go by this name."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each call ends, and the chain of calls that makes the step as long as it is."""

    step_s: float
    ends_s: Mapping[str, float]
    critical_path: tuple[str, ...]


def node_order(workflow: Workflow) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Calls in workflow order with what each waits for; the weight synchronisation comes last, after everything."""
    order = workflow.order()
    before: dict[str, list[str]] = {name: [] for name in order}
    for earlier, later in workflow.edges():
        before[later].append(earlier)
    if workflow.weight_syncs:
        touched = {model_stage for pair in workflow.weight_syncs for model_stage in pair}
        before[SYNC] = [name for name in order if workflow.call(name).model_stage in touched]
        order = (*order, SYNC)
    return order, {name: tuple(names) for name, names in before.items()}


def mask(devices: Iterable[int]) -> int:
    """Devices as bits, for quick tests of overlap."""
    bits = 0
    for device in devices:
        bits |= 1 << device
    return bits


def turns(
    order: Sequence[str], before: Mapping[str, Collection[str]], devices: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """What each call waits for, its turn on shared devices (as bits) included."""
    waits: dict[str, tuple[str, ...]] = {}
    for index, name in enumerate(order):
        mine, known = devices[name], before[name]
        shared = tuple(other for other in order[:index] if devices[other] & mine and other not in known)
        waits[name] = (*known, *shared)
    return waits


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
