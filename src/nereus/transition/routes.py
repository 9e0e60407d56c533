"""Moves between two region maps: per tensor and kind, which device sends which index range to whom (D6.1, D5.12).

A region is an interval of a tensor's cut dim (the whole dim 0 where it is uncut). Padding is never part of a region,
so it never moves; replicated KV heads and both ends of tied embeddings are owners of the same region.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nereus.core import (
    DTYPE_BYTES,
    EMU,
    Box,
    Destroy,
    Extend,
    Kind,
    Merge,
    ModelStage,
    Move,
    Primitive,
    Split,
    StateSchema,
    TransitionDAG,
    TransitionError,
)
from nereus.transition.flows import Flow, Job, flows


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
    (found,) = flows(schema, (Job(tuple(sources), tuple(targets)),), lacking, node_of)
    return expand_flows(found, schema, kinds, device)


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
    goal = set(dag.goal)
    return tuple(dict.fromkeys(unit for primitive in group for unit in primitive.targets if unit in goal))


def source_units(dag: TransitionDAG, group: Iterable[Primitive]) -> tuple[EMU, ...]:
    """The whole units that a commit group reads: of the start, or of the goal where an earlier group built them.

    What its own steps make is none, even under an equal name.
    """
    group = tuple(group)
    whole = {*dag.start, *dag.goal} - {unit for primitive in group for unit in primitive.targets}
    return tuple(dict.fromkeys(unit for primitive in group for unit in primitive.sources if unit in whole))


def flows_of(dag: TransitionDAG, model_stage: ModelStage, schema: StateSchema) -> dict[str, tuple[Flow, ...]]:
    """Acquiring primitive id → its flows, for one model-stage; a flow belongs to exactly one primitive."""
    names = sorted((name for name, group in dag.groups.items() if group[0].model_stage == model_stage), key=_natural)
    groups = [dag.groups[name] for name in names]
    jobs = [Job(source_units(dag, group), goal_units(dag, group)) for group in groups]
    found: dict[str, list[Flow]] = {primitive.id: [] for group in groups for primitive in group}
    if jobs:
        for group, job, entries in zip(groups, jobs, flows(schema, jobs, node_of=dag.node_of), strict=True):
            held = frozenset(device for unit in job.sources for device in unit.devices)
            chosen: dict[tuple[int, int], str] = {}
            for flow in entries:
                ends = (flow.source, flow.target)
                if ends not in chosen:
                    chosen[ends] = _carrier(group, held, *ends).id
                found[chosen[ends]].append(flow)
    return {name: tuple(entries) for name, entries in found.items()}


def _natural(name: str) -> tuple[int, str]:
    """Balancing goes in the order in which groups were made, whatever order they are scheduled in."""
    return (len(name), name)


def moves_of(
    dag: TransitionDAG,
    primitive: Primitive,
    schema: StateSchema,
    device: int | None = None,
) -> tuple[Move, ...]:
    """The moves of one primitive; with `device`, those that it sends or receives. A Destroy moves nothing."""
    if isinstance(primitive, Destroy):
        return ()
    found = flows_of(dag, primitive.model_stage, schema)
    return expand_flows(found[primitive.id], schema, device=device)


def _carrier(group: Sequence[Primitive], held: frozenset[int], source: int, target: int) -> Primitive:
    """Inside one source unit: its Split; to a device that held nothing: the Extend; else the Merge."""
    for primitive in group:
        if isinstance(primitive, Split) and {source, target} <= set(primitive.sources[0].devices):
            return primitive
    wanted = Merge if target in held else Extend
    for primitive in group:
        if isinstance(primitive, wanted) and any(target in unit.devices for unit in primitive.targets):
            return primitive
    raise TransitionError(f"no {wanted.__name__} of group {group[0].group} builds on device {target}")


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


def alias_source(dag: TransitionDAG, group: Iterable[Primitive], device: int) -> EMU | None:
    """The unit whose position on `device` a commit group reads locally, if there is one.

    Of a unit in `dag.offloaded` no storage can be taken over: everything is copied from host memory.
    """
    return next((unit for unit in source_units(dag, group) if device in unit.devices), None)
