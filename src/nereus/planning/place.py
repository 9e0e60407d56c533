"""Which devices each part and each unit gets: TP groups inside a node, replicas packed, devices in use first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from nereus.core import Assignment, Candidate, ModelStage, Partition, Plan, Stage
from nereus.planning.pool import Site
from nereus.planning.space import Group, Shape

Units = tuple[tuple[int, ...], ...]
Slots = Sequence[tuple[int, ...]]


def place(candidate: Candidate, nodes: Slots) -> Units:
    """Units packed into nodes of these devices, each node keeping what it cannot use.

    One unit after another; with expert groups one pp rank after another, all its replicas side by side.
    """
    tp, cp = candidate.layout.tp, candidate.cp
    piece = tp * cp if any(len(node) >= tp * cp for node in nodes) else tp
    pp, dp = candidate.layout.pp, candidate.dp
    flat: list[int] = []
    wanted = candidate.devices
    for node in nodes:
        if len(flat) >= wanted:
            break
        flat += node[: len(node) // piece * piece]
    if len(flat) < wanted:
        raise ValueError(f"{candidate}: {len(flat)} devices in blocks of {piece}, {wanted} are needed")
    if candidate.ep == 1:
        return _cut(flat[:wanted], tp * cp * pp)
    blocks = _cut(flat[:wanted], tp * cp)
    return tuple(tuple(chain.from_iterable(blocks[unit::dp])) for unit in range(dp))


def _cut(devices: Sequence[int], size: int) -> Units:
    """Neighbours in sets of this size."""
    return tuple(zip(*[iter(devices)] * size, strict=True))


def shared_out(
    shape: Shape,
    sites: Mapping[ModelStage, Site],
    chosen: Mapping[ModelStage, tuple[Candidate, int]],
    current: Plan | None,
) -> Plan:
    """A plan of this shape: `chosen` has each candidate with its slots, `sites` where each may be.

    Partitions of one site get disjoint slots of it, groups disjoint ones of their partition's; the slots that the
    current plan uses for the same model-stages are preferred.
    """
    now = {a.candidate.model_stage: a.devices for a in current.assignments} if current else {}
    free: dict[Site, list[tuple[int, ...]]] = {}
    assignments, partitions = [], []
    for groups in shape.partitions:
        inside = [ms for group in groups for ms in group]
        if len({sites[ms] for ms in inside}) == 1:
            site = sites[inside[0]]
            before = now if site.regular else {}
            needs = {group: max(chosen[ms][1] for ms in group) for group in groups}
            widths = [sum(needs[g] for g in groups if g[0].stage is stage) for stage in {g[0].stage for g in groups}]
            part, free[site] = _taken(free.get(site, list(site.slots)), max(widths), inside, before)
            homes = _dealt(part, groups, needs, before)
            nodes = {ms: _nodes(site, homes[group]) for group in groups for ms in group}
        else:
            nodes = {ms: list(sites[ms].nodes) for ms in inside}
            part = [node for ms in inside for node in nodes[ms]]
        assignments += [Assignment(chosen[ms][0], place(chosen[ms][0], nodes[ms])) for ms in inside]
        partitions.append(Partition(frozenset(inside), frozenset(device for slot in part for device in slot)))
    return Plan(tuple(sorted(assignments, key=lambda a: a.candidate.model_stage.sort_key)), tuple(partitions))


def _dealt(
    part: Slots, groups: Sequence[Group], needs: Mapping[Group, int], now: Mapping[ModelStage, frozenset[int]]
) -> dict[Group, list[tuple[int, ...]]]:
    """Disjoint slots of a partition for the groups of each stage."""
    left: dict[Stage, list[tuple[int, ...]]] = {}
    found = {}
    for group in groups:
        stage = group[0].stage
        found[group], left[stage] = _taken(left.get(stage, list(part)), needs[group], group, now)
    return found


def _nodes(site: Site, slots: Slots) -> Slots:
    """Slots as nodes: those of a single node are one."""
    return slots if len(site.nodes) > 1 else [tuple(device for slot in slots for device in slot)]


def _taken(
    slots: Slots, count: int, model_stages: Sequence[ModelStage], now: Mapping[ModelStage, frozenset[int]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The slots that these model-stages use most already, in order; and the others."""
    uses = [now[ms] for ms in model_stages if ms in now]
    ranked = list(range(len(slots)))
    if uses:
        ranked.sort(key=lambda index: -sum(device in used for device in slots[index] for used in uses))
    front = set(ranked[:count])
    return [slots[index] for index in ranked[:count]], [slot for index, slot in enumerate(slots) if index not in front]
