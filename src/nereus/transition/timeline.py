"""When each primitive of a transition runs, from what its busiest device sends or receives, and does beside that."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from nereus.core import Cluster, Destroy, EMUSet, Merge, ModelStage, Offload, Primitive, StateSchema, TransitionDAG
from nereus.cost.constants import of_kind, of_link, state_bytes_per_s
from nereus.transition.buckets import bucket_bytes, staging_bytes
from nereus.transition.exchanges import Exchange, Pairs, numbered
from nereus.transition.fit import stored_bytes
from nereus.transition.profile import PerSchema
from nereus.transition.routes import exchanges, shares, source_units

PRIMITIVE_S = 2e-3
"""Command and commit round trip of one primitive."""
GROUP_SETUP_S = 5e-3
"""Making the communicators of one transition, for each device that takes part."""
COPYING, HASHING = "state.copy_bytes_per_s", "state.hash_bytes_per_s"


@dataclass(frozen=True, slots=True)
class Load:
    """What a primitive moves: seconds of its busiest device, and bytes by kind of link."""

    seconds: float
    intra_bytes: int = 0
    inter_bytes: int = 0

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes by kind of link."""
        return {"intra": self.intra_bytes, "inter": self.inter_bytes}


NOTHING = Load(0.0)
bucket_of = PerSchema(lambda schema: bucket_bytes(schema.tensors, schema.dtypes))


@dataclass(frozen=True, slots=True)
class Span:
    """When a primitive runs, in ideal seconds from the start of the transition, and the one it waited for last."""

    start_s: float
    end_s: float
    cause: str | None


class Loads:
    """The load of every primitive, and the staging buffers of every device. What is alike is priced once."""

    def __init__(self, dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema], cluster: Cluster) -> None:
        self._cluster = cluster
        self._rates = {name: state_bytes_per_s(link) for name, link in cluster.links.items()}
        self._together = of_link(cluster.links["intra"], "state.all_bytes_per_s")
        kinds = cluster.kinds.values()
        copying, hashing = (min(of_kind(kind, name) for kind in kinds) for name in (COPYING, HASHING))
        known: dict[tuple[int, Sequence[int]], tuple[Pairs, Load, Mapping[int, int]]] = {}
        """(id of what is moved, nodes) → it, so that the id stays its own; its load; what each device stages."""
        self.of: dict[str, Load] = {}
        """Acquiring primitive or Offload, by id."""
        self.staging_bytes: dict[int, int] = {}
        """Device → the most that its buffers take; it runs one primitive at a time."""
        buffers = self.staging_bytes
        beside = isfinite(copying) or isfinite(hashing)
        node_of = dag.node_of or {device.id: device.node for device in cluster.devices}
        for group, exchange in exchanges(dag, schemas):
            schema, devices = schemas[group[0].model_stage], exchange.devices
            # A pattern is of one arrangement of nodes where the transition knows them.
            nodes = exchange.pattern.nodes or numbered(exchange.devices, node_of)
            apart = () if exchange.pattern.nodes else nodes
            for primitive, share in zip(group, shares(group, exchange), strict=True):
                found = known.get((id(share), apart))
                if found is None:
                    found = known[id(share), apart] = share, *self._load(share, nodes, schema)
                _, self.of[primitive.id], staged = found
                for index, size in staged.items():
                    device = devices[index]
                    if size > buffers.get(device, 0):
                        buffers[device] = size
            if beside:
                first = group[0].id
                beside_s = _copied_bytes(group, exchange, schema) / copying + _hashed_bytes(group, schema) / hashing
                self.of[first] = replace(self.of[first], seconds=self.of[first].seconds + beside_s)
        for primitive in dag.primitives:
            if isinstance(primitive, Offload):
                self.of[primitive.id] = Load(max(map(self._to_host_s, *zip(*primitive.hosts.items(), strict=True))))

    def _to_host_s(self, device: int, size: int) -> float:
        rate = self._cluster.kind(device).host_bytes_per_s or self._cluster.links["intra"].bytes_per_s
        return size / rate

    def _load(self, share: Pairs, nodes: Sequence[int], schema: StateSchema) -> tuple[Load, Mapping[int, int]]:
        """The load of what is moved, and the bytes that each device stages."""
        sending, receiving = [0.0] * len(nodes), [0.0] * len(nodes)
        """Seconds that each device is busy with either."""
        inside = dict.fromkeys(nodes, 0)
        """Node → bytes that it sends itself."""
        traffic: dict[tuple[int, int], int] = {}
        near, far = ((self._rates[name], self._cluster.links[name].latency_s) for name in ("intra", "inter"))
        element_bytes = schema.element_bytes
        for pair, elements in share.items():
            source, target = pair
            traffic[pair] = size = elements * element_bytes
            rate, latency_s = far
            if nodes[source] == nodes[target]:
                rate, latency_s = near
                inside[nodes[source]] += size
            taken_s = size / rate + latency_s
            sending[source] += taken_s
            receiving[target] += taken_s
        seconds = max(max(sending, default=0.0), max(receiving, default=0.0))
        if isfinite(self._together):
            seconds = max(seconds, max(inside.values(), default=0) / self._together)
        intra_bytes = sum(inside.values())
        load = Load(seconds, intra_bytes, sum(traffic.values()) - intra_bytes)
        return load, staging_bytes(traffic, bucket_of(schema))


def _copied_bytes(group: Sequence[Primitive], exchange: Exchange, schema: StateSchema) -> int:
    """The most that one device allocates and does not receive: what it has already, and is cut anew."""
    copied = Counter[int]()
    for primitive in group:
        copied.update(primitive.acquires)
    for target, elements in exchange.pattern.received.items():
        copied[exchange.devices[target]] -= elements * schema.element_bytes
    return max(0, *copied.values())


def _hashed_bytes(group: Sequence[Primitive], schema: StateSchema) -> int:
    """The most that one device holds of units that must be equal to be merged."""
    units = source_units(group)
    if len(units) < 2 or not any(isinstance(primitive, Merge) for primitive in group):
        return 0
    return max(stored_bytes(EMUSet(units), {group[0].model_stage: schema}).values())


def with_groups(staging_bytes: Mapping[int, int], cluster: Cluster) -> dict[int, int]:
    """Device → its staging buffers and its part of the transition's communication group."""
    kind_of = {device.id: device.kind for device in cluster.devices}
    group = {name: round(of_kind(kind, "communicator.bytes")) for name, kind in cluster.kinds.items()}
    return {
        device: size + (group[kind_of[device]] if device in kind_of else 0) for device, size in staging_bytes.items()
    }


def timeline(dag: TransitionDAG, loads: Mapping[str, Load]) -> dict[str, Span]:
    """Primitive id → its span: it waits for its predecessors and for what ran before it on its devices."""
    before: dict[str, list[str]] = defaultdict(list)
    for edge in dag.edges:
        before[edge.later].append(edge.earlier)
    spans: dict[str, Span] = {}
    last_on: dict[int, str] = {}
    for primitive in dag.primitives:
        devices, name = primitive.devices, primitive.id
        on = list(map(last_on.get, devices))
        waits = {*on, *before[name]} if name in before else set(on)
        cause, start_s = None, -1.0
        for each in waits:
            if each is not None:
                end_s = spans[each].end_s
                if end_s > start_s or (end_s == start_s and cause and each < cause):
                    cause, start_s = each, end_s
        joining = 0 if isinstance(primitive, Destroy | Offload) else on.count(None)
        start_s = max(start_s, 0.0)
        seconds = GROUP_SETUP_S * joining + PRIMITIVE_S + loads.get(name, NOTHING).seconds
        spans[name] = Span(start_s, start_s + seconds, cause)
        last_on.update(dict.fromkeys(devices, name))
    return spans


def critical_path(spans: Mapping[str, Span]) -> tuple[str, ...]:
    """The primitives that the last one to end waited for, one after another, and itself."""
    path: list[str] = []
    step = max(spans, key=lambda name: spans[name].end_s, default=None)
    while step is not None:
        path.append(step)
        step = spans[step].cause
    return tuple(reversed(path))
