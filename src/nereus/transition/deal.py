"""Deals places to devices, node by node, so that most bytes stay where they are; what is alike is dealt once.

The places that a plan puts on one node are a *block*. A block may change nodes as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from scipy.optimize import linear_sum_assignment

from nereus.transition.profile import Ints
from nereus.transition.rows import Lookup

WINDOW = 256
"""Up to so many nodes are dealt together; larger pools go in runs of neighbours."""
TABLES = 1 << 20
"""Entries of tables of overlaps that are looked at together."""
MIXER = np.uint64(0x9E3779B97F4A7C15)
"""An odd number with its bits spread: sums of its powers hardly ever agree by chance."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """(nodes, places) each: a row is what is free on one node, and the block that the plan puts there."""

    devices: Ints
    held: Ints
    """What each device holds: a row of the table of overlaps."""
    places: Ints
    wanted: Ints
    """What each place is: a column of that table."""
    named: Ints
    """The device that the plan names for each place."""

    def rows(self, chosen: Ints | slice) -> Blocks:
        """Some of the nodes."""
        return Blocks(*(getattr(self, each.name)[chosen] for each in fields(self)))


def deal(free: Ints, held: Ints, named: Ints, overlap: Ints, nodes: Lookup, kinds: Lookup | None = None) -> Ints:
    """(places,): the device of each place, from as many `free` ones.

    Places are whole units, one after another; the plan has `named` a device for each. `overlap` is (what is held,
    positions of a unit) in bytes. `nodes` tells the node of devices; every node has as many of `free` and `named`.
    Nodes of unequal `kinds` do not change places.
    """
    if np.array_equal(free, named) and _cannot_be_better(held, overlap):
        return named
    node = nodes(free)
    by_node, by_place = (np.argsort(each, kind="stable") for each in (node, nodes(named)))
    starts = np.flatnonzero(np.diff(node[by_node], prepend=node.min() - 1))
    lengths = np.diff(starts, append=len(free))
    every = Blocks(free[by_node], held[by_node], by_place, by_place % overlap.shape[1], named[by_place])
    chosen = np.empty(len(free), dtype=np.int64)
    for length in np.unique(lengths).tolist():
        index = starts[lengths == length][:, None] + np.arange(length)
        blocks = every.rows(index)
        alike = [np.arange(len(index))] if kinds is None else groups(np.sort(kinds(blocks.devices), axis=1))
        _deal(blocks, alike, overlap, chosen)
    return chosen


def _cannot_be_better(held: Ints, overlap: Ints) -> bool:
    """Whether the device of each place, in their order, already holds as much as any order could give."""
    places = np.arange(len(held)) % overlap.shape[1]
    stays = overlap[held, places].sum()
    at_most = (
        overlap.max(axis=1)[held].sum(),
        overlap[np.bincount(held, minlength=len(overlap)) > 0].max(axis=0)[places].sum(),
    )
    return bool(stays == min(at_most))


def _deal(blocks: Blocks, alike: Sequence[Ints], overlap: Ints, chosen: Ints) -> None:
    """Enter the devices of these blocks into `chosen`; only nodes that are `alike` change places."""
    held, held_id = distinct(blocks.held)
    wanted, wanted_id = distinct(blocks.wanted)
    unit = blocks.places[:, 0] // overlap.shape[1]
    home = np.arange(len(unit))
    known: dict[bytes, Ints] = {}
    for nodes in alike:
        for first in range(0, len(nodes), WINDOW):
            window = nodes[first : first + WINDOW]
            near = unit[window] - unit[window[0]]
            key = np.stack([held_id[window], wanted_id[window], near]).tobytes()
            if key not in known:
                known[key] = _homes(overlap, held, wanted, np.stack([held_id[window], wanted_id[window], near]))
            home[window] = window[known[key]]
    devices = blocks.devices[home]
    kinds, kind = distinct(np.column_stack([held_id[home], wanted_id, _order(devices, blocks.named)]))
    dealt = np.empty((len(kinds), blocks.places.shape[1]), dtype=np.int64)
    for each, (has, takes, *order) in zip(dealt, kinds.tolist(), strict=True):
        # Among equals the plan's own order wins: twice the bytes leave room for half a byte of preference.
        preferred = overlap[held[has]][:, wanted[takes]] * 2 + (np.arange(len(order))[:, None] == order)
        rows, columns = linear_sum_assignment(preferred, maximize=True)
        each[columns] = rows
    chosen[blocks.places] = np.take_along_axis(devices, dealt[kind], axis=1)


def _order(devices: Ints, named: Ints) -> Ints:
    """(blocks, places): which of the devices of a block the plan names for a place; -1: none."""
    found = np.tile(np.arange(devices.shape[1]), (len(devices), 1))
    others = np.flatnonzero((devices != named).any(axis=1))
    as_named = devices[others][:, :, None] == named[others][:, None, :]
    found[others] = np.where(as_named.any(axis=1), as_named.argmax(axis=1), -1)
    return found


def _homes(overlap: Ints, held: Ints, wanted: Ints, blocks: Ints) -> Ints:
    """Block → the node whose devices take it. `blocks` are (what it holds, what it is, its unit) of nodes in a row."""
    (has, has_id), (takes, takes_id) = (np.unique(each, return_inverse=True) for each in blocks[:2])
    worth = _worth(overlap, held[has], wanted[takes])[np.ix_(has_id, takes_id)]
    """(nodes, blocks): the bytes that stay when a node takes a block."""
    if worth.trace() >= min(worth.max(axis=1).sum(), worth.max(axis=0).sum()):
        return np.arange(len(worth))
    # Among equals the node that the plan names wins, then a node of the same unit.
    near = (blocks[2][:, None] == blocks[2]) + np.eye(len(worth), dtype=np.int64)
    rows, columns = linear_sum_assignment(worth * 4 + near, maximize=True)
    found: Ints = rows[np.argsort(columns)]
    return found


def _worth(overlap: Ints, held: Ints, wanted: Ints) -> Ints:
    """(nodes, blocks): bytes that stay where they are when a node's devices take a block as well as they can."""
    length = held.shape[1]
    found = np.empty((len(held), len(wanted)), dtype=np.int64)
    rows = max(1, TABLES // (len(wanted) * length * length))
    for first in range(0, len(held), rows):
        tables = overlap[held[first : first + rows, None, :, None], wanted[:, None, :]]
        """(nodes, blocks, devices, places)"""
        best, at = tables.max(axis=3), tables.argmax(axis=3)
        found[first : first + rows] = best.sum(axis=2)
        # Where devices want the same place, only an assignment tells.
        at = np.sort(np.where(best > 0, at, -1 - np.arange(length)), axis=2)
        for node, block in np.argwhere((np.diff(at, axis=2) == 0).any(axis=2)).tolist():
            taken = linear_sum_assignment(tables[node, block], maximize=True)
            found[first + node, block] = tables[node, block][taken].sum()
    return found


def distinct(rows: Ints) -> tuple[Ints, Ints]:
    """The distinct rows, and the number of each row."""
    mixed = rows.astype(np.uint64) @ np.full(rows.shape[1], MIXER).cumprod()
    _, first, numbers = np.unique(mixed, return_index=True, return_inverse=True)
    found = rows[first]
    if not np.array_equal(found[numbers], rows):  # rows that differ have been mixed to one number
        found, numbers = np.unique(rows, axis=0, return_inverse=True)
    return found, numbers.reshape(-1)


def groups(rows: Ints) -> list[Ints]:
    """The numbers of the rows that are equal, for each distinct row."""
    found, numbers = distinct(rows)
    return np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers, minlength=len(found)))[:-1])
