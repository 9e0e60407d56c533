"""Seconds and bytes of a transition before it runs, from closed forms over identical layers (D6.8)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nereus.core import (
    Calibration,
    Cluster,
    Destroy,
    ModelStage,
    Primitive,
    StateSchema,
    TransitionDAG,
    TransitionEstimate,
)
from nereus.transition.fit import peak_bytes
from nereus.transition.flows import Flow
from nereus.transition.minimum import composed_bytes, minimum_bytes
from nereus.transition.routes import flows_of

PRIMITIVE_S = 2e-3
"""Command and commit round trip of one primitive."""
GROUP_SETUP_S = 5e-3
"""Making the communicators of one transition, for each device that takes part."""


def estimate(
    dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema], cluster: Cluster, calibration: Calibration
) -> TransitionEstimate:
    """What `dag` is expected to take: `transition_overhead_s + transition_scale * ideal` seconds, nothing for no steps.

    The ideal is the critical path: a primitive waits for its predecessors and for its devices, and takes as long as
    its busiest device needs to send or to receive over each kind of link.
    """
    moved = traffic(dag, schemas, cluster)
    spans = timeline(dag, moved, cluster)
    ideal_s = max((span.end_s for span in spans.values()), default=0.0)
    seconds = calibration.transition_overhead_s + calibration.transition_scale * ideal_s if dag.primitives else 0.0
    by_link: Counter[str] = Counter({"intra": 0, "inter": 0})
    for entry in moved.values():
        by_link.update(on_links(entry))
    changed = [ms for ms in dag.start.model_stages if set(dag.start.of(ms)) != set(dag.goal.of(ms))]
    return TransitionEstimate(
        seconds=seconds,
        peak_bytes=peak_bytes(dag, schemas),
        link_bytes=dict(by_link),
        moved_bytes=by_link.total(),
        minimum_bytes=sum(minimum_bytes(schemas[ms], dag.start.of(ms), dag.goal.of(ms)) for ms in changed),
        composed_bytes=sum(composed_bytes(schemas[ms], dag.start.of(ms), dag.goal.of(ms)) for ms in changed),
        critical_path=critical_path(spans),
    )


Traffic = Mapping[tuple[int, int, str], int]
"""(source, target, kind of link) → bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a primitive runs, in ideal seconds from the start of the transition, and the one it waited for last."""

    start_s: float
    end_s: float
    cause: str | None


def traffic(dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema], cluster: Cluster) -> dict[str, Traffic]:
    """Acquiring primitive id → what it moves."""
    node_of = {device.id: device.node for device in cluster.devices}
    return {
        name: _traffic(found, schemas[ms].element_bytes, node_of)
        for ms in dag.start.model_stages
        for name, found in flows_of(dag, ms, schemas[ms]).items()
    }


def on_links(entry: Traffic) -> Counter[str]:
    """Bytes by kind of link."""
    total: Counter[str] = Counter()
    for (_, _, link), count in entry.items():
        total[link] += count
    return total


def _traffic(found: Iterable[Flow], element_bytes: int, node_of: Mapping[int, int]) -> Traffic:
    total: Counter[tuple[int, int, str]] = Counter()
    for flow in found:
        # A device that has left the cluster is taken to be far away.
        near = flow.source in node_of and node_of[flow.source] == node_of.get(flow.target)
        total[flow.source, flow.target, "intra" if near else "inter"] += flow.elements * element_bytes
    return total


def _seconds(traffic: Traffic, cluster: Cluster) -> float:
    """Time of the busiest device: bytes over bandwidth, and one latency for each peer."""
    busy: dict[tuple[int, str], float] = defaultdict(float)
    for (source, target, name), count in traffic.items():
        link = cluster.links[name]
        for end in ((source, "out"), (target, "in")):
            busy[end] += count / link.bytes_per_s + link.latency_s
    return max(busy.values(), default=0.0)


def timeline(dag: TransitionDAG, moved: Mapping[str, Traffic], cluster: Cluster) -> dict[str, Span]:
    """Primitive id → its span: it waits for its predecessors and for what ran before it on its devices."""
    before = dag.predecessors()
    spans: dict[str, Span] = {}
    last_on: dict[int, str] = {}
    for primitive in dag.primitives:
        waits = before[primitive.id] | {last_on[device] for device in primitive.devices if device in last_on}
        cause = max(sorted(waits), key=lambda name: spans[name].end_s, default=None)
        setup_s = GROUP_SETUP_S * _joining(primitive, last_on)
        start_s = 0.0 if cause is None else spans[cause].end_s
        end_s = start_s + setup_s + PRIMITIVE_S + _seconds(moved.get(primitive.id, {}), cluster)
        spans[primitive.id] = Span(start_s, end_s, cause)
        last_on.update(dict.fromkeys(primitive.devices, primitive.id))
    return spans


def critical_path(spans: Mapping[str, Span]) -> tuple[str, ...]:
    """The primitives that the last one to end waited for, one after another, and itself."""
    path: list[str] = []
    step = max(spans, key=lambda name: spans[name].end_s, default=None)
    while step is not None:
        path.append(step)
        step = spans[step].cause
    return tuple(reversed(path))


def _joining(primitive: Primitive, seen: Mapping[int, str]) -> int:
    return 0 if isinstance(primitive, Destroy) else sum(device not in seen for device in primitive.devices)
