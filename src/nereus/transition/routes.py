"""Moves between two region maps: per tensor and kind, which device sends which index range to whom (D6.1, D5.12).

A region is an interval of a tensor's cut dim (the whole dim 0 where it is uncut). Padding is never part of a region,
so it never moves; replicated KV heads and both ends of tied embeddings are owners of the same region.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nereus.core import (
    DTYPE_BYTES,
    EMU,
    Box,
    Destroy,
    Extend,
    Kind,
    Layout,
    Merge,
    ModelStage,
    Move,
    Offload,
    Primitive,
    Split,
    StateSchema,
    TransitionDAG,
    TransitionError,
)
from nereus.transition.exchanges import Exchange, Exchanges, Pairs, exchanges_of
from nereus.transition.flows import Flow, Job


def routes(
    schema: StateSchema,
    sources: Sequence[EMU],
    targets: Sequence[EMU],
    kinds: Sequence[Kind] | None = None,
    lacking: bool = True,
    device: int | None = None,
    node_of: Mapping[int, int] | None = None,
) -> tuple[Move, ...]:
    """Every range that a target device lacks, each from exactly one owner, spread over the replicas.

    Without `lacking`, what a target device can copy from its own source shard is listed too, as a move from the
    device to itself. With `device`, only the moves that it sends or receives are expanded. The order is the same on
    every rank.
    """
    found = exchanges_of(schema).of(Job(tuple(sources), tuple(targets)), lacking, node_of)
    return expand_flows(found.flows(device), schema, kinds)


def expand_flows(
    found: Iterable[Flow], schema: StateSchema, kinds: Sequence[Kind] | None = None, device: int | None = None
) -> tuple[Move, ...]:
    """One move for each tensor and kind of each flow; with `device`, of the flows it takes part in."""
    sizes = {kind: DTYPE_BYTES[schema.dtypes[kind]] for kind in (schema.dtypes if kinds is None else kinds)}
    moves: list[Move] = []
    for flow in found:
        if device is not None and device not in (flow.source, flow.target):
            continue
        box = Box(flow.tensors[0].cut.dim or 0, flow.start, flow.stop)
        elements = (flow.stop - flow.start) * flow.row_elements
        each = [(kind, elements * size) for kind, size in sizes.items()]
        targets = (flow.target,)
        for tensor in flow.tensors:
            moves.extend(Move(tensor.name, kind, box, flow.source, targets, size) for kind, size in each)
    return tuple(moves)


def goal_units(dag: TransitionDAG, group: Iterable[Primitive]) -> tuple[EMU, ...]:
    """The goal units that a commit group builds."""
    group = tuple(group)
    if len(group) == 1:
        return group[0].targets
    goal = set(dag.goal.of(group[0].model_stage))
    return tuple(dict.fromkeys(unit for primitive in group for unit in primitive.targets if unit in goal))


def source_units(group: Iterable[Primitive]) -> tuple[EMU, ...]:
    """The whole units that a commit group reads: of the start, or of the goal where an earlier group built them.

    What its own steps make is none, even under an equal name.
    """
    group = tuple(group)
    if len(group) == 1:
        return group[0].sources
    made = {unit for primitive in group for unit in primitive.targets}
    return tuple(dict.fromkeys(unit for primitive in group for unit in primitive.sources if unit not in made))


def by_device(units: Iterable[EMU]) -> dict[int, EMU]:
    """Device → the unit that it belongs to, of disjoint ones."""
    return {device: unit for unit in units for device in unit.devices}


def flows_of(
    dag: TransitionDAG, model_stage: ModelStage, schema: StateSchema, device: int | None = None
) -> dict[str, tuple[Flow, ...]]:
    """Acquiring primitive id → its flows, for one model-stage; a flow belongs to exactly one primitive.

    With `device`, only those that it sends or receives.
    """
    found: dict[str, list[Flow]] = {}
    for group, exchange in exchanges(dag, {model_stage: schema}):
        found.update((primitive.id, []) for primitive in group)
        carrier = Carriers(group)
        for flow in exchange.flows(device):
            found[carrier.of(flow.source, flow.target)].append(flow)
    return {name: tuple(entries) for name, entries in found.items()}


def exchanges(
    dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema]
) -> Iterator[tuple[tuple[Primitive, ...], Exchange]]:
    """Each commit group of the model-stages in `schemas`, and what it moves."""
    goal: dict[ModelStage, dict[tuple[int, ...], Layout]] = {}
    """Devices → the layout of the unit there, for the units of the goal."""
    found: dict[ModelStage, Exchanges] = {}
    for group in dag.groups.values():
        ms = group[0].model_stage
        if ms in schemas:
            read, built = group[0].sources, group[0].targets
            if len(group) > 1:
                read = source_units(group)
                if ms not in goal:
                    goal[ms] = {unit: block.layout for block in dag.goal.blocks(ms) for unit in block.devices}
                there = goal[ms].get
                made = [unit for primitive in group for unit in primitive.targets]
                built = tuple(dict.fromkeys([unit for unit in made if there(unit.devices) == unit.layout]))
            if ms not in found:
                found[ms] = exchanges_of(schemas[ms])
            yield group, found[ms].of(Job(read, built), node_of=dag.node_of)


def shares(group: Sequence[Primitive], exchange: Exchange) -> Sequence[Pairs]:
    """What each primitive of a group moves, in order; devices are numbered as in `exchange.devices`."""
    pattern = exchange.pattern
    if len(group) == 1:
        return (pattern.pairs,)
    number = dict(zip(exchange.devices, range(len(exchange.devices)), strict=True)).get
    key = tuple(
        (type(each), *(tuple(map(number, unit.devices)) for unit in (*each.sources, *each.targets))) for each in group
    )
    if key not in pattern.shares:
        place = {primitive.id: index for index, primitive in enumerate(group)}
        found: tuple[dict[tuple[int, int], int], ...] = tuple({} for _ in group)
        carrier = Carriers(group)
        for (source, target), elements in pattern.pairs.items():
            name = carrier.of(exchange.devices[source], exchange.devices[target])
            found[place[name]][source, target] = elements
        pattern.shares[key] = found
    return pattern.shares[key]


def pair_bytes(dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema]) -> dict[str, dict[tuple[int, int], int]]:
    """Acquiring primitive id → (source, target) → bytes."""
    found: dict[str, dict[tuple[int, int], int]] = {}
    for group, exchange in exchanges(dag, schemas):
        each, devices = schemas[group[0].model_stage].element_bytes, exchange.devices
        for primitive, share in zip(group, shares(group, exchange), strict=True):
            found[primitive.id] = {(devices[s], devices[t]): count * each for (s, t), count in share.items()}
    return found


def fingerprint(dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema]) -> str:
    """Equal on two ranks exactly when they expand the same flows for the same groups."""
    found = hashlib.sha256()
    for group, exchange in exchanges(dag, schemas):
        found.update(f"{[primitive.id for primitive in group]} {exchange.devices}".encode())
        found.update(exchange.pattern.digest)
    return found.hexdigest()[:16]


class Carriers:
    """Which primitive of a group moves what: inside one source unit its Split, to a device that held nothing the
    Extend, else the Merge."""

    def __init__(self, group: Sequence[Primitive]) -> None:
        self._group = group
        self._held = frozenset(device for unit in source_units(group) for device in unit.devices)
        self._split: dict[int, str] = {}
        self._to: dict[type[Primitive], dict[int, str]] = {Merge: {}, Extend: {}}
        for primitive in group:
            if isinstance(primitive, Split):
                for device in primitive.sources[0].devices:
                    self._split.setdefault(device, primitive.id)
            else:
                for unit in primitive.targets:
                    for device in unit.devices:
                        self._to[type(primitive)].setdefault(device, primitive.id)

    def of(self, source: int, target: int) -> str:
        """The primitive that moves something from one device to another."""
        split = self._split.get(source)
        if split is not None and split == self._split.get(target):
            return split
        wanted: type[Primitive] = Merge if target in self._held else Extend
        found = self._to[wanted].get(target)
        if found is None:
            name = wanted.__name__
            raise TransitionError(f"no {name} of group {self._group[0].group} builds on device {target}")
        return found


def moves_of(
    dag: TransitionDAG,
    primitive: Primitive,
    schema: StateSchema,
    device: int | None = None,
) -> tuple[Move, ...]:
    """The moves of one primitive; with `device`, those that it sends or receives. Destroy and Offload move nothing."""
    if isinstance(primitive, Destroy | Offload):
        return ()
    return expand_flows(flows_of(dag, primitive.model_stage, schema, device)[primitive.id], schema)


def local_copies(schema: StateSchema, old: EMU, new: EMU, device: int, staged: bool = False) -> tuple[Move, ...]:
    """What `device` copies from its old position into newly allocated tensors of its new one (aliased ones not).

    Of a `staged` position, which lies in host memory, everything is copied.
    """
    shared = frozenset[str]() if staged else aliased(schema, old, new, device)
    before = {tensor.name: (start, stop) for tensor, start, stop in schema.held(old, device)}
    moves: list[Move] = []
    for tensor, start, stop in schema.held(new, device):
        held = before.get(tensor.name, (0, 0))
        low, high = max(start, held[0]), min(stop, held[1])
        if low >= high or tensor.name in shared:
            continue
        dim = tensor.cut.dim or 0
        rest = tensor.elements // tensor.shape[dim] if tensor.shape else 1
        for kind, dtype in schema.dtypes.items():
            size = (high - low) * rest * DTYPE_BYTES[dtype]
            moves.append(Move(tensor.name, kind, Box(dim, low, high), device, (device,), size))
    return tuple(moves)


def aliased(schema: StateSchema, old: EMU, new: EMU, device: int) -> frozenset[str]:
    """Names of the tensors whose storage the new position takes over: equal interval and equal local shape."""
    if device not in old.devices or device not in new.devices:
        return frozenset()
    (_, old_rank), (_, new_rank) = old.position(device), new.position(device)
    old_tp, new_tp = old.layout.tp, new.layout.tp
    before = {tensor.name: (start, stop) for tensor, start, stop in schema.held(old, device)}
    return frozenset(
        tensor.name
        for tensor, start, stop in schema.held(new, device)
        if before.get(tensor.name) == (start, stop)
        and tensor.local_shape(old_tp, old_rank) == tensor.local_shape(new_tp, new_rank)
    )


def alias_source(group: Iterable[Primitive], device: int) -> EMU | None:
    """The unit whose position on `device` a commit group reads locally, if there is one.

    Of a unit in `dag.offloaded` no storage can be taken over: everything is copied from host memory.
    """
    return next((unit for unit in source_units(group) if device in unit.devices), None)
