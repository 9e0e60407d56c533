"""Which device takes which position of the goal units: as few bytes as possible move (D6.3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from nereus.core import EMU, EMUSet, Layout, ModelStage, Plan, StateSchema
from nereus.transition.classes import layouts_of
from nereus.transition.sizes import Sizes, position

Slot = tuple[int, ...]
"""The devices that a plan names for one unit."""


def place(
    start: EMUSet,
    plan: Plan,
    schemas: Mapping[ModelStage, StateSchema],
    node_of: Mapping[int, int] | None = None,
) -> EMUSet:
    """The goal units of `plan`, on the devices it names.

    An existing unit that fits is kept whole. The other positions of a model-stage are dealt to its devices by linear
    assignment on overlapping bytes; a position stays on the node that the plan gave it when `node_of` is given.
    """
    units: list[EMU] = []
    for assignment in plan.assignments:
        ms, layout = assignment.candidate.model_stage, assignment.candidate.layout
        existing = start.of(ms)
        if existing:
            units.extend(_place_one(existing, layout, assignment.units, schemas[ms], node_of))
        else:
            units.extend(EMU(ms, layout, devices) for devices in assignment.units)
    return EMUSet(tuple(units))


def _place_one(
    existing: Sequence[EMU],
    layout: Layout,
    slots: Sequence[Slot],
    schema: StateSchema,
    node_of: Mapping[int, int] | None,
) -> list[EMU]:
    kept = _kept(existing, layout, slots, node_of)
    taken = {device for unit in kept.values() for device in unit.devices}
    free = [device for slot in slots for device in slot if device not in taken]
    places = [(slot, index) for slot in range(len(slots)) if slot not in kept for index in range(layout.size)]
    chosen: dict[tuple[int, int], int] = {}
    if places:
        sizes = Sizes(schema, (*layouts_of(existing), layout))
        at = {device: position(unit, device) for unit in existing for device in unit.devices}
        for node, block in _by_node([slots[slot][index] for slot, index in places], node_of).items():
            devices = [device for device in free if node_of is None or node_of[device] == node]
            wanted = [places[index] for index in block]
            profit = sizes.overlaps([at.get(device) for device in devices], [(layout, index) for _, index in wanted])
            # Among equals the plan's own order wins: twice the bytes leave room for half a byte of preference.
            named = np.array([slots[slot][index] for slot, index in wanted])
            preferred = profit * 2 + (np.array(devices)[:, None] == named[None, :])
            rows, columns = linear_sum_assignment(preferred, maximize=True)
            chosen |= {wanted[column]: devices[row] for row, column in zip(rows, columns, strict=True)}
    ms = existing[0].model_stage
    return [
        kept[slot] if slot in kept else EMU(ms, layout, tuple(chosen[slot, index] for index in range(layout.size)))
        for slot in range(len(slots))
    ]


def _kept(
    existing: Sequence[EMU], layout: Layout, slots: Sequence[Slot], node_of: Mapping[int, int] | None
) -> dict[int, EMU]:
    """Slot → existing unit that takes it: first where the devices are the same, then where they are all there."""
    kept: dict[int, EMU] = {}
    pool = {device for slot in slots for device in slot}
    fitting = [unit for unit in existing if unit.layout == layout and pool.issuperset(unit.devices)]
    by_devices = {frozenset(slot): index for index, slot in enumerate(slots)}
    rest: list[EMU] = []
    for unit in fitting:
        index = by_devices.get(frozenset(unit.devices))
        if index is None:
            rest.append(unit)
        else:
            kept[index] = unit
    for unit in rest:
        pattern = _nodes(unit.devices, node_of)
        open_slots = [i for i, slot in enumerate(slots) if i not in kept and _nodes(slot, node_of) == pattern]
        if open_slots:
            kept[max(open_slots, key=lambda i: (len(set(slots[i]) & set(unit.devices)), -i))] = unit
    return kept


def _nodes(devices: Sequence[int], node_of: Mapping[int, int] | None) -> tuple[int, ...]:
    return () if node_of is None else tuple(node_of[device] for device in devices)


def _by_node(devices: Sequence[int], node_of: Mapping[int, int] | None) -> dict[int, list[int]]:
    """Node → indices into `devices`; one block when nodes are unknown."""
    blocks: dict[int, list[int]] = defaultdict(list)
    for index, device in enumerate(devices):
        blocks[0 if node_of is None else node_of[device]].append(index)
    return blocks
