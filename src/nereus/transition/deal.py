"""Deals places to devices, node by node, so that most bytes stay where they are; what is alike is dealt once.

The places that a plan puts on one node are a *block*. A block may change nodes as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from scipy.optimize import linear_sum_assignment

from nereus.transition.profile import Ints

WINDOW = 256
"""Up to so many nodes are dealt together; larger pools go in runs of neighbours."""


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


def deal(
    free: Ints, held: Ints, named: Ints, overlap: Ints, nodes: tuple[Ints, Ints], kinds: Ints | None = None
) -> Ints:
    """(places,): the device of each place, from as many `free` ones.

    Places are whole units, one after another; the plan has `named` a device for each. `overlap` is (what is held,
    positions of a unit) in bytes. `nodes` are those of `free` and of `named`; every node has as many of both. Nodes
    of unequal `kinds` do not change places.
    """
    by_node, by_place = (np.argsort(each, kind="stable") for each in nodes)
    starts = np.flatnonzero(np.diff(nodes[0][by_node], prepend=nodes[0].min() - 1))
    lengths = np.diff(starts, append=len(free))
    every = Blocks(free[by_node], held[by_node], by_place, by_place % overlap.shape[1], named[by_place])
    chosen = np.empty(len(free), dtype=np.int64)
    for length in np.unique(lengths).tolist():
        index = starts[lengths == length][:, None] + np.arange(length)
        blocks = every.rows(index)
        for alike in [slice(None)] if kinds is None else groups(np.sort(kinds[by_node][index], axis=1)):
            own = blocks.rows(alike)
            for first in range(0, len(own.devices), WINDOW):
                _deal(own.rows(slice(first, first + WINDOW)), overlap, chosen)
    return chosen


def _deal(blocks: Blocks, overlap: Ints, chosen: Ints) -> None:
    """Enter the devices of these blocks into `chosen`."""
    held, held_id = distinct(blocks.held)
    wanted, wanted_id = distinct(blocks.wanted)
    worth = _worth(overlap, held, wanted)[np.ix_(held_id, wanted_id)]
    home = _homes(worth, blocks.places[:, 0] // overlap.shape[1])
    devices = blocks.devices[home]
    as_named = devices[:, :, None] == blocks.named[:, None, :]
    """(blocks, devices, places): whether the plan names the device for the place."""
    pairs = np.stack([held_id[home], wanted_id], axis=1)
    order = np.where(as_named.any(axis=1), as_named.argmax(axis=1), -1)
    for alike in groups(np.concatenate([pairs, order], axis=1)):
        has, takes = pairs[alike[0]].tolist()
        # Among equals the plan's own order wins: twice the bytes leave room for half a byte of preference.
        preferred = overlap[held[has]][:, wanted[takes]] * 2 + as_named[alike[0]]
        rows, columns = linear_sum_assignment(preferred, maximize=True)
        chosen[blocks.places[alike]] = devices[alike][:, rows[np.argsort(columns)]]


def _homes(worth: Ints, units: Ints) -> Ints:
    """Block → the node whose devices take it, from the bytes that stay when a node (row) takes a block (column)."""
    count = len(worth)
    if worth.trace() >= worth.max(axis=1).sum() or worth.trace() >= worth.max(axis=0).sum():
        return np.arange(count)
    # Among equals the node that the plan names wins, then a node of the same unit.
    near = (units[:, None] == units[None, :]) + np.eye(count, dtype=np.int64)
    rows, columns = linear_sum_assignment(worth * 4 + near, maximize=True)
    found: Ints = rows[np.argsort(columns)]
    return found


def _worth(overlap: Ints, held: Ints, wanted: Ints) -> Ints:
    """(nodes, blocks): bytes that stay where they are when a node's devices take a block as well as they can."""
    found = np.zeros((len(held), len(wanted)), dtype=np.int64)
    for index, one in enumerate(held):
        tables = overlap[one][:, wanted].transpose(1, 0, 2)  # (blocks, devices, places)
        best, at = tables.max(axis=2), tables.argmax(axis=2)
        found[index] = best.sum(axis=1)
        # Where devices want the same place, only an assignment tells.
        at = np.sort(np.where(best > 0, at, -1 - np.arange(len(one))), axis=1)
        for block in np.flatnonzero((np.diff(at, axis=1) == 0).any(axis=1)):
            rows, columns = linear_sum_assignment(tables[block], maximize=True)
            found[index, block] = tables[block][rows, columns].sum()
    return found


def distinct(rows: Ints) -> tuple[Ints, Ints]:
    """The distinct rows, and the number of each row."""
    data, width = rows.tobytes(), rows.shape[1] * rows.itemsize
    number: dict[bytes, int] = {}
    numbers = [number.setdefault(data[at : at + width], len(number)) for at in range(0, len(data), width)]
    found = np.frombuffer(b"".join(number), dtype=rows.dtype).reshape(-1, rows.shape[1])
    return found, np.array(numbers)


def groups(rows: Ints) -> list[Ints]:
    """The numbers of the rows that are equal, for each distinct row."""
    found, numbers = distinct(rows)
    return np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers, minlength=len(found)))[:-1])
