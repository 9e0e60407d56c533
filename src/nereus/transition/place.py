"""Which device takes which position of the goal units: as few bytes as possible move (D6.3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from nereus.core import EMU, EMUSet, Layout, ModelStage, Plan, StateSchema
from nereus.transition.classes import layouts_of
from nereus.transition.sizes import Position, Sizes

T = TypeVar("T")
Slot = tuple[int, ...]
"""The devices that a plan names for one unit."""
Place = tuple[int, int]
"""(slot, index of a position in it)."""
Held = tuple[Position | None, ...]
"""What the devices of a node hold."""
Wanted = tuple[int, ...]
"""The positions that a plan puts on a node."""
WINDOW = 256
"""Up to so many nodes are dealt together; larger pools go in runs of neighbours."""


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
            units.extend(_place_one(existing, layout, assignment.units, schemas[ms], node_of, kind_of or {}))
        else:
            units.extend(EMU(ms, layout, devices) for devices in assignment.units)
    return EMUSet(tuple(units))


def _place_one(
    existing: Sequence[EMU],
    layout: Layout,
    slots: Sequence[Slot],
    schema: StateSchema,
    node_of: Mapping[int, int] | None,
    kind_of: Mapping[int, str],
) -> list[EMU]:
    kept = _kept(existing, layout, slots, node_of)
    taken = {device for unit in kept.values() for device in unit.devices}
    free = [device for slot in slots for device in slot if device not in taken]
    places = [(slot, index) for slot in range(len(slots)) if slot not in kept for index in range(layout.size)]
    chosen: dict[Place, int] = {}
    if places:
        deal = _Deal(existing, layout, slots, Sizes(schema, (*layouts_of(existing), layout)))
        devices = _by_node(free, free, node_of)
        blocks = _by_node(places, [slots[slot][index] for slot, index in places], node_of)
        for node, home in deal.homes(devices, blocks, kind_of).items():
            chosen |= deal.positions(devices[home], blocks[node])
    ms = existing[0].model_stage
    return [
        kept[slot] if slot in kept else EMU(ms, layout, tuple(chosen[slot, index] for index in range(layout.size)))
        for slot in range(len(slots))
    ]


class _Deal:
    """Who takes what of one model-stage. Nodes that hold and want the same are computed once."""

    def __init__(self, existing: Sequence[EMU], layout: Layout, slots: Sequence[Slot], sizes: Sizes) -> None:
        self._layout, self._slots, self._sizes = layout, slots, sizes
        self._at = {device: (unit.layout, index) for unit in existing for index, device in enumerate(unit.devices)}
        self._overlap: dict[tuple[Held, Wanted], NDArray[np.int64]] = {}
        self._order: dict[tuple[Held, Wanted, tuple[int, ...]], list[int]] = {}

    def positions(self, devices: Sequence[int], places: Sequence[Place]) -> dict[Place, int]:
        """The best deal of places among as many devices."""
        # Among equals the plan's own order wins: twice the bytes leave room for half a byte of preference.
        row_of = {device: row for row, device in enumerate(devices)}
        named = tuple(row_of.get(self._slots[slot][index], -1) for slot, index in places)
        key = (self._held(devices), _wanted(places), named)
        if key not in self._order:
            preferred = self._overlaps(*key[:2]) * 2 + (np.arange(len(devices))[:, None] == np.array(named)[None, :])
            rows, columns = linear_sum_assignment(preferred, maximize=True)
            self._order[key] = [int(row) for row in rows[np.argsort(columns)]]
        return {place: devices[row] for place, row in zip(places, self._order[key], strict=True)}

    def homes(
        self, devices: Mapping[int, Sequence[int]], blocks: Mapping[int, Sequence[Place]], kind_of: Mapping[int, str]
    ) -> dict[int, int]:
        """Node that the plan names for a block of places → the node whose devices take it."""
        alike: dict[object, list[int]] = defaultdict(list)
        for node, block in blocks.items():
            alike[len(block), tuple(sorted(kind_of.get(device, "") for device in devices[node]))].append(node)
        found: dict[int, int] = {}
        for nodes in alike.values():
            for start in range(0, len(nodes), WINDOW):
                window = nodes[start : start + WINDOW]
                worth = self._worth([devices[node] for node in window], [blocks[node] for node in window])
                if worth.trace() < worth.max(axis=1).sum():
                    # Among equals the node that the plan names wins, then a node of the same unit.
                    units = np.array([blocks[node][0][0] for node in window])
                    near = (units[:, None] == units[None, :]) + np.eye(len(window), dtype=np.int64)
                    rows, columns = linear_sum_assignment(worth * 4 + near, maximize=True)
                else:
                    rows = columns = np.arange(len(window))
                found |= {window[column]: window[row] for row, column in zip(rows, columns, strict=True)}
        return found

    def _worth(self, devices: Sequence[Sequence[int]], blocks: Sequence[Sequence[Place]]) -> NDArray[np.int64]:
        """(nodes, blocks): bytes that stay where they are when a node's devices take a block."""
        held, row_of = _numbered([self._held(each) for each in devices])
        wanted, column_of = _numbered([_wanted(block) for block in blocks])
        table = np.array([[_best(self._overlaps(one, other)) for other in wanted] for one in held], dtype=np.int64)
        found: NDArray[np.int64] = table[np.ix_(row_of, column_of)]
        return found

    def _held(self, devices: Sequence[int]) -> Held:
        return tuple(self._at.get(device) for device in devices)

    def _overlaps(self, held: Held, wanted: Wanted) -> NDArray[np.int64]:
        if (held, wanted) not in self._overlap:
            places = [(self._layout, index) for index in wanted]
            self._overlap[held, wanted] = self._sizes.overlaps(list(held), places)
        return self._overlap[held, wanted]


def _wanted(places: Sequence[Place]) -> Wanted:
    return tuple(index for _, index in places)


def _best(profit: NDArray[np.int64]) -> int:
    rows, columns = linear_sum_assignment(profit, maximize=True)
    return int(profit[rows, columns].sum())


def _numbered(items: Sequence[T]) -> tuple[list[T], list[int]]:
    """The distinct items, and the number of each."""
    number: dict[T, int] = {}
    numbers = [number.setdefault(item, len(number)) for item in items]
    return list(number), numbers


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


def _by_node(items: Sequence[T], devices: Sequence[int], node_of: Mapping[int, int] | None) -> dict[int, list[T]]:
    """Node of its device → items; one block when nodes are unknown."""
    blocks: dict[int, list[T]] = defaultdict(list)
    for item, device in zip(items, devices, strict=True):
        blocks[0 if node_of is None else node_of[device]].append(item)
    return blocks
