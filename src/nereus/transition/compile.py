"""From the units that exist to a plan: place → decompose → schedule → fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from nereus.core import (
    EMU,
    EMUSet,
    InfeasibleError,
    Layout,
    Lot,
    ModelStage,
    Plan,
    StateSchema,
    TransitionDAG,
)
from nereus.transition.bound import bound_bytes
from nereus.transition.budget import Budget
from nereus.transition.deadlock import deadlocked
from nereus.transition.decompose import LocalDAG, decompose
from nereus.transition.fit import check, stored_bytes
from nereus.transition.fold import Alike, Space, fold
from nereus.transition.place import place
from nereus.transition.schedule import BESIDE, IN_PLACE, IN_TURN, TRIED_GROUPS, Aim, BlockedError, Memory, schedule
from nereus.transition.search import search
from nereus.transition.site import Site
from nereus.transition.sizes import need_schemas
from nereus.transition.sparing import crowd_of, led, spared

TRIED_WHOLE = 100
"""What the parts end above the bound is ordered in one piece as well; beyond so many commit groups, by one rule alone.
"""
SMALL, LARGE = (64, 256), (600, 4096)
"""Commit groups, and units that go or come: always up to the first; up to the others where that may well be shorter."""
LONG_GROUPS, MUCH_IDLE = 5, 2.0
"""It may where parts that end last have so many groups, and the others' devices are idle for so much longer."""


def compile(
    start: EMUSet,
    plan: Plan,
    schemas: Mapping[ModelStage, StateSchema],
    budget: Budget | None = None,
    site: Site | None = None,
) -> TransitionDAG:
    """The transition from `start` to `plan`, as `connect` makes it, with positions dealt so that least moves."""
    return connect(start, place(start, plan, schemas, site), schemas, budget, site)


def connect(
    start: EMUSet,
    goal: EMUSet,
    schemas: Mapping[ModelStage, StateSchema],
    budget: Budget | None = None,
    site: Site | None = None,
) -> TransitionDAG:
    """The transition between two sets of units whose positions are settled. No budget: memory has no limit.

    Raises InfeasibleError when no order of the steps fits.
    """
    budget, site = budget or Budget(), site or Site()
    model_stages = sorted({*start.model_stages, *goal.model_stages}, key=lambda ms: ms.sort_key)
    changed = [ms for ms in model_stages if start.blocks(ms) != goal.blocks(ms)]
    need_schemas(schemas, changed)
    used = stored_bytes(start, schemas, budget.other_bytes) if budget.capacity else {}
    memory = Memory(used, budget.capacity, budget.other_bytes, budget.buffer_bytes)
    if changed and all(start.blocks(ms) and goal.blocks(ms) for ms in changed):
        space = Space(used, budget.capacity, budget.buffer_bytes, site.node_of)
        parts = fold(start, goal, changed, schemas, space)
        if parts:
            try:
                dag, groups = _of_parts(start, goal, parts, schemas, memory, site)
            except BlockedError:  # ordered as a whole, a part may get help from others
                pass
            else:
                dag = dag if dag.certified else _shorter(dag, groups, changed, schemas, memory, site)
                return spared(dag, schemas, memory, site)
    return _whole(start, goal, changed, schemas, memory, site, budget.host_bytes)


def _of_parts(
    start: EMUSet,
    goal: EMUSet,
    parts: Sequence[Alike],
    schemas: Mapping[ModelStage, StateSchema],
    memory: Memory,
    site: Site,
) -> tuple[TransitionDAG, int]:
    """Each part ordered on its own, and the number of commit groups before any has fallen apart.

    Raises BlockedError when one of them has no order that fits.

    A part that has units of a model-stage before and after always has a whole one, so that all may leave where no new
    one is made.
    """
    changed: list[list[LocalDAG]] = []
    for part in parts:
        changed.append([])
        for ms in sorted({*part.start.model_stages, *part.goal.model_stages}, key=lambda ms: ms.sort_key):
            sub = Layout.common(*(block.layout for units in (start, goal) for block in units.blocks(ms)))
            ends = part.start.of(ms), part.goal.of(ms)
            copied = ms in part.stays or not ends[1]
            changed[-1].append(decompose(*ends, schemas[ms], (), site.node_of, sub, copied))
    every = [
        replace(local, copies=len(part.devices), elsewhere=local.model_stage in part.stays)
        for part, locals_ in zip(parts, changed, strict=True)
        for local in locals_
    ]
    least = bound_bytes(every, memory.used, memory.capacity, site)
    lots: list[Lot] = []
    longest, groups = 0.0, 0
    for part, locals_ in sorted(zip(parts, changed, strict=True), key=_work, reverse=True):
        own = _within(memory, part.devices[0].tolist())
        aim = Aim(0.0, max(least, longest), TRIED_GROUPS // len(parts))
        dag = _ordered(part.start, part.goal, locals_, schemas, own, site, aim)
        longest = max(longest, dag.span_bytes)
        if not dag.idle:
            groups += len(part.devices) * sum(len(local.builds) for local in locals_)
            lots.append(Lot(dag, tuple(map(tuple, part.devices.tolist()))))
    lots.sort(key=lambda lot: lot.dag.primitives[0].model_stage.sort_key)
    return TransitionDAG.folded(start, goal, tuple(lots), site.node_of, round(longest), round(least)), groups


def _shorter(
    dag: TransitionDAG,
    groups: int,
    changed: Sequence[ModelStage],
    schemas: Mapping[ModelStage, StateSchema],
    memory: Memory,
    site: Site,
) -> TransitionDAG:
    """`dag`, or the order in one piece where that is shorter and the whole, of so many groups, is small enough."""
    units = sum(len(block.devices) for ms in changed for ends in (dag.start, dag.goal) for block in ends.blocks(ms))
    limits = LARGE if _unequal(dag) else SMALL
    if groups > limits[0] or units > limits[1]:
        return dag
    aim = Aim(dag.bound_bytes, 0.0, None if groups <= TRIED_WHOLE else 0, dag.span_bytes)
    start, goal = dag.start, dag.goal
    locals_ = [decompose(start.of(ms), goal.of(ms), schemas[ms], (), site.node_of) for ms in changed]
    try:
        return _ordered(start, goal, locals_, schemas, memory, site, aim)
    except BlockedError:
        return dag


def _unequal(dag: TransitionDAG) -> bool:
    """Whether parts that end last have a lot to do, and others little, so that these may help."""
    last = [lot for lot in dag.lots if lot.dag.span_bytes >= dag.span_bytes]
    busy = dag.span_bytes * sum(len(lot.copies) * len(lot.copies[0]) for lot in last)
    idle = sum((dag.span_bytes - lot.dag.span_bytes) * len(lot.copies) * len(lot.copies[0]) for lot in dag.lots)
    return idle >= MUCH_IDLE * busy and any(len(lot.dag.groups) >= LONG_GROUPS for lot in last)


def _work(entry: tuple[Alike, Sequence[LocalDAG]]) -> int:
    """Bytes that have to arrive at a part, one after another if all came to one device."""
    return sum(build.received_bytes for local in entry[1] for build in local.builds)


def _within(memory: Memory, devices: Collection[int]) -> Memory:
    """The memory of some devices."""
    used, capacity, other = (
        {device: sizes[device] for device in devices if device in sizes}
        for sizes in (memory.used, memory.capacity, memory.other)
    )
    return Memory(used, capacity, other, memory.buffer_bytes)


def _ordered(
    start: EMUSet,
    goal: EMUSet,
    locals_: list[LocalDAG],
    schemas: Mapping[ModelStage, StateSchema],
    memory: Memory,
    site: Site,
    aim: Aim | None = None,
) -> TransitionDAG:
    """The order of one way to decompose, or of one that takes over less storage. Raises BlockedError when none fits."""
    roomy = _uncrowded(locals_, start, goal, schemas, memory, site) if memory.capacity else locals_
    ways: dict[str, Sequence[LocalDAG]] = {IN_PLACE: locals_}
    if roomy != locals_:
        ways[BESIDE] = roomy
    if any(not build.sources for local in locals_ for build in local.builds):
        ways[IN_TURN] = [local.in_turn() for local in locals_]
    dag = schedule(start, goal, ways, memory, site, None, aim)
    if memory.capacity:
        check(dag, memory.used, memory.capacity, memory.buffer_bytes)
    return dag


def _whole(
    start: EMUSet,
    goal: EMUSet,
    changed: Sequence[ModelStage],
    schemas: Mapping[ModelStage, StateSchema],
    memory: Memory,
    site: Site,
    host_bytes: Mapping[int, int],
) -> TransitionDAG:
    """All parts in one order. Raises InfeasibleError when no order fits."""
    locals_ = [decompose(start.of(ms), goal.of(ms), schemas[ms], (), site.node_of) for ms in changed]
    try:
        aim = Aim(hopeless=lambda: not host_bytes and deadlocked(crowd_of(start, goal, schemas, locals_, memory)))
        return spared(_ordered(start, goal, locals_, schemas, memory, site, aim), schemas, memory, site)
    except BlockedError as blocked:
        return _searched(blocked, (start, goal), schemas, locals_, memory, site, host_bytes)


def _searched(
    blocked: BlockedError,
    ends: tuple[EMUSet, EMUSet],
    schemas: Mapping[ModelStage, StateSchema],
    locals_: Sequence[LocalDAG],
    memory: Memory,
    site: Site,
    host_bytes: Mapping[int, int],
) -> TransitionDAG:
    """The way that an exact search finds where the greedy order ended. Raises InfeasibleError when there is none."""
    crowd = crowd_of(*ends, schemas, locals_, memory)
    found = search(*ends, schemas, crowd, memory.other, host_bytes, site.node_of)
    if found.lead is None:
        tried = "every order of the steps was ruled out" if found.proved else "no order was found in the tries allowed"
        staged = "staging in host memory included" if host_bytes else "no host memory to stage in was given"
        raise InfeasibleError(f"{blocked}; {tried}, {staged}", blocked.short_bytes) from None
    return led(*ends, found.lead, locals_, schemas, memory, site)


def _uncrowded(
    locals_: Sequence[LocalDAG],
    start: EMUSet,
    goal: EMUSet,
    schemas: Mapping[ModelStage, StateSchema],
    memory: Memory,
    site: Site,
) -> list[LocalDAG]:
    """The same without taking over storage of units that leave no room beside them for what is built from them."""
    full = _full(locals_, memory)
    if not full:
        return list(locals_)
    stays = {device: memory.used.get(device, 0) for device in full}
    held: list[dict[int, tuple[EMU, int]]] = []
    for local in locals_:
        held.append({})
        for unit in local.left:
            for device, size in zip(unit.devices, local.pricing.stored(unit.layout), strict=True):
                if device in full:
                    held[-1][device] = unit, size
                    stays[device] -= size
    found: list[LocalDAG] = []
    for local, old in zip(locals_, held, strict=True):
        crowded: dict[EMU, None] = {}
        for build in local.builds:
            for device in old.keys() & build.acquires if build.sources else ():
                unit, size = old[device]
                wanted = build.acquires[device]
                if wanted and stays[device] + size + wanted + memory.buffer_bytes > memory.capacity[device]:
                    crowded[unit] = None
        ms = local.model_stage
        if crowded:
            units = (start.of(ms), goal.of(ms))
            local = decompose(*units, schemas[ms], crowded, site.node_of, local.sub, local.elsewhere)
        found.append(local)
    return found


def _full(locals_: Sequence[LocalDAG], memory: Memory) -> set[int]:
    """Devices with no room for what is built there, before anything leaves, from what can be read in place."""
    limits = {device: limit - memory.buffer_bytes for device, limit in memory.capacity.items()}
    return {
        device
        for local in locals_
        for build in local.builds
        for device, wanted in (build.acquires.items() if build.sources else ())
        if wanted and device in limits and memory.used.get(device, 0) + wanted > limits[device]
    }
