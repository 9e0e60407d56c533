"""Which device takes which position of the goal units: as few bytes as possible move (D6.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np

from nereus.core import EMU, EMUSet, Layout, ModelStage, Plan, StateSchema
from nereus.transition.classes import by_layout
from nereus.transition.deal import deal
from nereus.transition.profile import Ints
from nereus.transition.sizes import sizes_of

Slot = tuple[int, ...]
"""The devices that a plan names for one unit."""


def place(
    start: EMUSet,
    plan: Plan,
    schemas: Mapping[ModelStage, StateSchema],
    node_of: Mapping[int, int] | None = None,
    kind_of: Mapping[int, str] | None = None,
) -> EMUSet:
    """The goal units of `plan`, on the devices it names.

    An existing unit that fits is kept whole. The other positions of a model-stage are dealt to its devices by linear
    assignment on overlapping bytes. With `node_of`, the positions that the plan put on one node stay together on one:
    what crosses nodes in the plan does so in the goal. Nodes whose devices differ by `kind_of` do not change places.
    """
    units: list[EMU] = []
    for assignment in plan.assignments:
        ms, layout = assignment.candidate.model_stage, assignment.candidate.layout
        existing = start.of(ms)
        if existing:
            units.extend(_place_one(existing, layout, assignment.units, schemas[ms], node_of, kind_of))
        else:
            units.extend(EMU(ms, layout, devices) for devices in assignment.units)
    return EMUSet(tuple(units))


def _place_one(
    existing: Sequence[EMU],
    layout: Layout,
    slots: Sequence[Slot],
    schema: StateSchema,
    node_of: Mapping[int, int] | None,
    kind_of: Mapping[int, str] | None,
) -> list[EMU]:
    kept = _kept(existing, layout, slots, node_of)
    if len(kept) == len(slots):
        return [kept[slot] for slot in range(len(slots))]
    taken = {device for unit in kept.values() for device in unit.devices}
    free = [device for slot in slots for device in slot if device not in taken]
    named = [device for index, slot in enumerate(slots) if index not in kept for device in slot]
    overlap, held = overlaps(existing, layout, schema, free)
    kinds = None if kind_of is None else [kind_of.get(device, "") for device in free]
    chosen = deal(free, held, named, overlap, (_nodes(free, node_of), _nodes(named, node_of)), kinds)
    rows = iter(chosen.reshape(-1, layout.size).tolist())
    ms = existing[0].model_stage
    return [kept[slot] if slot in kept else EMU(ms, layout, tuple(next(rows))) for slot in range(len(slots))]


def overlaps(existing: Sequence[EMU], layout: Layout, schema: StateSchema, free: Sequence[int]) -> tuple[Ints, Ints]:
    """(what can be held, positions of `layout`) bytes in common, and which row of it each of `free` holds.

    The last row is that of devices that hold nothing.
    """
    sizes, at, base = sizes_of(schema), dict[int, int](), 0
    tables: list[Ints] = []
    for old, units in by_layout(existing).items():
        tables.append(sizes.overlap(old, layout))
        positions = cycle(range(base, base + old.size))
        at.update(zip((device for unit in units for device in unit.devices), positions, strict=False))
        base += old.size
    table = np.concatenate([*tables, np.zeros((1, layout.size), dtype=np.int64)])
    return table, np.array([at.get(device, base) for device in free])


def _kept(
    existing: Sequence[EMU], layout: Layout, slots: Sequence[Slot], node_of: Mapping[int, int] | None
) -> dict[int, EMU]:
    """Slot → existing unit that takes it: first where the devices are the same, then where they are all there."""
    fitting = {unit.devices: unit for unit in by_layout(existing).get(layout, ())}
    if not fitting:
        return {}
    kept = {index: fitting.pop(slot) for index, slot in enumerate(slots) if slot in fitting}
    pool = {device for slot in slots for device in slot} if fitting else set[int]()
    by_devices = {frozenset(slot): i for i, slot in enumerate(slots) if i not in kept} if fitting else {}
    rest: list[EMU] = []
    for unit in fitting.values():
        index = by_devices.get(frozenset(unit.devices))
        if index is not None:
            kept[index] = unit
        elif pool.issuperset(unit.devices):
            rest.append(unit)
    for unit in rest:
        pattern = _nodes(unit.devices, node_of)
        open_slots = [i for i, slot in enumerate(slots) if i not in kept and _nodes(slot, node_of) == pattern]
        if open_slots:
            kept[max(open_slots, key=lambda i: (len(set(slots[i]) & set(unit.devices)), -i))] = unit
    return kept


def _nodes(devices: Sequence[int], node_of: Mapping[int, int] | None) -> list[int]:
    """The node of each; all one when nodes are unknown."""
    return [0] * len(devices) if node_of is None else [node_of[device] for device in devices]
