"""Which parts of a transition are alike but for their devices, so that one order does for all of them.

Devices that a unit or a node ties together are one *cell*. Nothing but state that is read from elsewhere joins cells: a
*lot* is a set of cells that needs no device outside, and is ordered as a transition of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count, repeat

import numpy as np

from nereus.core import EMUBlock, EMUSet, ModelStage, StateSchema
from nereus.transition.deal import distinct
from nereus.transition.lots import Flags, Needs, lots_of
from nereus.transition.profile import Ints
from nereus.transition.rows import numbered, rows_of, runs
from nereus.transition.sizes import sizes_of

AMPLE = np.iinfo(np.int64).max
"""Stands for memory that can never run short."""


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """(lots, devices) device numbers of lots that are alike, each in ascending order; and the units on the first.

    Of the model-stages `stays` a unit stays for good, there or elsewhere.
    """

    devices: Ints
    start: EMUSet
    goal: EMUSet
    stays: frozenset[ModelStage]


@dataclass(frozen=True, slots=True)
class Space:
    """What is known of devices beside the units on them. Bytes in use and capacity are by device; no capacity: no
    limit."""

    used: Mapping[int, int]
    capacity: Mapping[int, int]
    buffer_bytes: int
    node_of: Mapping[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Units of one layout that a changed model-stage has before (`side` 0) or after (1) the transition."""

    stage: int
    side: int
    units: EMUBlock
    rows: Ints
    """(units, positions): devices, numbered in ascending order."""


def fold(
    start: EMUSet,
    goal: EMUSet,
    changed: Sequence[ModelStage],
    schemas: Mapping[ModelStage, StateSchema],
    space: Space,
) -> tuple[Alike, ...]:
    """All lots of the change of the model-stages `changed`, those that are alike together; none if all is one."""
    blocks, devices = _blocks(start, goal, changed)
    node = _nodes(devices, space.node_of)
    cell_of = _cells(blocks, node)
    cells = int(cell_of.max()) + 1
    if cells == 1:
        return ()
    free = _free(devices, blocks, schemas, changed, space)
    needs, stays = _needs(blocks, cell_of, len(changed), cells)
    lot_of = cell_of
    if not needs.apart:
        alike = np.empty(cells, dtype=np.int64)
        for number, (members, _) in enumerate(_alike(cell_of, blocks, node, free)):
            alike[members] = number
        lot_of = lots_of(needs, alike)[cell_of]
        if not lot_of.any():
            return ()
    found: list[Alike] = []
    for lots, of_lot in _alike(lot_of, blocks, node, free):
        here = lot_of == lots[0]
        ends = [EMUSet.of_blocks(_only(blocks, side, here)) for side in (0, 1)]
        found.append(Alike(devices[of_lot], ends[0], ends[1], frozenset(compress(changed, stays))))
    return tuple(found)


def _blocks(start: EMUSet, goal: EMUSet, changed: Sequence[ModelStage]) -> tuple[list[_Block], Ints]:
    """The units of the model-stages that change, and the devices on which they are, in ascending order."""
    every = [
        (stage, side, units)
        for stage, ms in enumerate(changed)
        for side, ends in enumerate((start, goal))
        for units in ends.blocks(ms)
    ]
    devices, rows = numbered([rows_of(units) for *_, units in every])
    return [_Block(*entry, each) for entry, each in zip(every, rows, strict=True)], devices


def _nodes(devices: Ints, node_of: Mapping[int, int]) -> Ints:
    """(devices,): the first device on the node of each; one without a node is alone, less one and negative."""
    alone: Ints = -1 - np.arange(len(devices))
    if not node_of:
        return alone
    nodes = _of_each(devices, node_of, AMPLE)
    known = np.flatnonzero(nodes != AMPLE)
    if not len(known):
        return alone
    (_, (number,)) = numbered([nodes[known]])
    first = np.empty(int(number.max()) + 1, dtype=np.int64)
    first[number[::-1]] = known[::-1]  # of equal numbers, the one that is written last stays
    alone[known] = first[number]
    return alone


def _of_each(devices: Ints, values: Mapping[int, int], default: int) -> Ints:
    """(devices,): the value of each."""
    return np.fromiter(map(values.get, devices.tolist(), repeat(default)), dtype=np.int64, count=len(devices))


def _free(
    devices: Ints,
    blocks: Iterable[_Block],
    schemas: Mapping[ModelStage, StateSchema],
    changed: Sequence[ModelStage],
    space: Space,
) -> Ints:
    """(devices,): bytes that are free at the start, `AMPLE` where that is enough for all that is ever built there."""
    if not space.capacity:
        return np.full(len(devices), AMPLE)
    wanted = np.full(len(devices), space.buffer_bytes)
    for block in blocks:
        if block.side:
            wanted[block.rows] += sizes_of(schemas[changed[block.stage]]).stored(block.units.layout)
    free = _of_each(devices, space.capacity, AMPLE) - _of_each(devices, space.used, 0)
    return np.where(free < wanted, free, AMPLE)


def _cells(blocks: Iterable[_Block], node: Ints) -> Ints:
    """(devices,): the number of the cell of each, by its first device."""
    at = np.where(node < 0, -1 - node, node)
    ends: list[Ints] = []
    for block in blocks:
        ties = at[block.rows]
        apart = ties[:, 1:] != ties[:, :-1]
        ends.append(np.stack([ties[:, 1:][apart], ties[:, :-1][apart]]))
    joined = np.concatenate(ends, axis=1)
    label = np.arange(len(at))
    """The first of those that are known to be joined."""
    while (joined[0] != joined[1]).any():
        np.minimum.at(label, joined.max(axis=0), joined.min(axis=0))
        while (label[label] != label).any():
            label = label[label]
        joined = label[joined]
    first = np.zeros(len(at), dtype=np.int64)
    first[label[at]] = 1
    found: Ints = (first.cumsum() - 1)[label[at]]
    return found


def _needs(blocks: Sequence[_Block], cell_of: Ints, stages: int, cells: int) -> tuple[Needs, Flags]:
    """What each cell needs; and the model-stages that keep a unit somewhere."""
    held, wanted = (np.zeros((stages, cells), dtype=np.int64) for _ in range(2))
    stays = np.zeros(stages, dtype=bool)
    for stage in range(stages):
        before, after = ([b for b in blocks if b.stage == stage and b.side == side] for side in (0, 1))
        left = np.zeros(len(cell_of), dtype=bool)
        for block in before:
            goes = _not_in(block, after, len(cell_of))
            stays[stage] |= not goes.all()
            left[block.rows[goes]] = True
            home = cell_of[block.rows[:, 0]]
            held[stage] += np.bincount(home, minlength=cells) * block.units.layout.size
        for block in after:
            home = cell_of[block.rows[:, 0]]
            lacking = _not_in(block, before, len(cell_of)) * (~left[block.rows]).sum(axis=1)
            wanted[stage] += np.bincount(home, lacking, minlength=cells).astype(np.int64)
    return Needs(held, wanted), stays


def _not_in(block: _Block, others: Iterable[_Block], devices: int) -> Flags:
    """(units,): whether the unit is not among `others` of the same layout."""
    found = np.ones(len(block.rows), dtype=bool)
    for other in others:
        if other.units.layout == block.units.layout:
            unit_on = np.zeros(devices, dtype=np.int64)
            unit_on[other.rows[:, 0]] = np.arange(len(other.rows))
            found &= (other.rows[unit_on[block.rows[:, 0]]] != block.rows).any(axis=1)
    return found


def _alike(lot_of: Ints, blocks: Sequence[_Block], node: Ints, free: Ints) -> list[tuple[Ints, Ints]]:
    """Numbers of lots that agree in all but their devices, and (lots, devices) the devices of each, ascending."""
    order = np.argsort(lot_of, kind="stable")
    starts, sizes = runs(lot_of[order])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    facts = np.stack([*_facts(blocks, rank), np.where(node < 0, -1, rank[node]), free], axis=1)
    found: list[tuple[Ints, Ints]] = []
    for size in np.unique(sizes).tolist():
        lots = np.flatnonzero(sizes == size)
        members = order[starts[lots][:, None] + np.arange(size)]
        numbers = _numbers(facts[members].reshape(len(lots), -1))
        found.extend((lots[numbers == each], members[numbers == each]) for each in range(int(numbers.max()) + 1))
    return found


def _facts(blocks: Iterable[_Block], rank: Ints) -> Iterable[Ints]:
    """(devices,) for each model-stage and side: which position of which unit, told by the rank of its first device."""
    codes: dict[tuple[int, int], Ints] = {}
    base = count(1)
    most = int(rank.max()) + 1
    for block in blocks:
        code = codes.setdefault((block.stage, block.side), np.zeros(len(rank), dtype=np.int64))
        places = np.array([next(base) for _ in range(block.units.layout.size)])
        code[block.rows] = places * most + rank[block.rows[:, :1]]
    return codes.values()


def _numbers(rows: Ints) -> Ints:
    """(rows,): the number of each distinct row, from the first on."""
    some, numbers = distinct(rows)
    first = np.empty(len(some), dtype=np.int64)
    first[numbers[::-1]] = np.arange(len(rows) - 1, -1, -1)
    rank = np.empty(len(some), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(some))
    return rank[numbers]


def _only(blocks: Iterable[_Block], side: int, here: Flags) -> Iterable[EMUBlock]:
    """The units of one side that are `here`."""
    for block in blocks:
        own = np.flatnonzero(here[block.rows[:, 0]]).tolist() if block.side == side else []
        if own:
            units = block.units
            yield EMUBlock(units.model_stage, units.layout, tuple(units.devices[index] for index in own))
