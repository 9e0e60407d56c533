"""Deals places to devices, node by node, so that most bytes stay where they are; what is alike is dealt once.

The places that a plan puts on one node are a *block*. A block may change nodes as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from nereus.transition.profile import Ints
from nereus.transition.rows import Lookup, runs

WINDOW = 256
"""Up to so many nodes are dealt together; larger pools go in runs of neighbours."""
TABLES = 1 << 20
"""Entries of tables of overlaps that are looked at together."""
FEW = 256
"""Up to so many rows are compared one by one."""
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
        named = self.named[chosen]
        return Blocks(self.devices[chosen], self.held[chosen], self.places[chosen], self.wanted[chosen], named)


def deal(free: Ints, held: Ints, named: Ints, overlap: Ints, nodes: Lookup, kinds: Lookup | None = None) -> Ints:
    """(places,): the device of each place, from as many `free` ones.

    Places are whole units, one after another; the plan has `named` a device for each. `overlap` is (what is held,
    positions of a unit) in bytes. `nodes` tells the node of devices; every node has as many of `free` and `named`.
    Nodes of unequal `kinds` do not change places.
    """
    same = np.array_equal(free, named)
    if same and _cannot_be_better(held, overlap):
        return named
    node = nodes(free)
    by_node = np.argsort(node, kind="stable")
    by_place = by_node if same else np.argsort(nodes(named), kind="stable")
    starts, lengths = runs(node[by_node])
    every = Blocks(free[by_node], held[by_node], by_place, by_place % overlap.shape[1], named[by_place])
    chosen = np.empty(len(free), dtype=np.int64)
    for length in sorted(set(lengths.tolist())):
        index = starts[lengths == length][:, None] + np.arange(length)
        blocks = every.rows(index)
        alike = [np.arange(len(index))] if kinds is None else groups(np.sort(kinds(blocks.devices), axis=1))
        _deal(blocks, alike, overlap, chosen)
    return chosen


def _cannot_be_better(held: Ints, overlap: Ints) -> bool:
    """Whether the device of each place, in their order, already holds as much as any order could give."""
    places = np.arange(len(held)) % overlap.shape[1]
    stays = overlap[held, places].sum()
    some = np.bincount(held, minlength=len(overlap)) > 0
    return bool(stays == min(overlap.max(axis=1)[held].sum(), overlap[some].max(axis=0)[places].sum()))


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
            run = np.stack([held_id[window], wanted_id[window], unit[window] - unit[window[0]]])
            key = run.tobytes()
            if key not in known:
                known[key] = _homes(overlap, held, wanted, run)
            home[window] = window[known[key]]
    devices, length = blocks.devices[home], blocks.places.shape[1]
    alone = (held_id[home, None], wanted_id[:, None], _order(devices, blocks.named))
    ways, way = distinct(np.concatenate(alone, axis=1))
    tables = overlap[held[ways[:, 0]][:, :, None], wanted[ways[:, 1]][:, None, :]]
    # Among equals the plan's own order wins: twice the bytes leave room for half a byte of preference.
    preferred = tables * 2 + (np.arange(length)[:, None] == ways[:, None, 2:])
    dealt = np.empty((len(ways), length), dtype=np.int64)
    for each, table in zip(dealt, preferred, strict=True):
        rows, columns = linear_sum_assignment(table, maximize=True)
        each[columns] = rows
    chosen[blocks.places] = devices[np.arange(len(devices))[:, None], dealt[way]]


def _order(devices: Ints, named: Ints) -> Ints:
    """(blocks, places): which of the devices of a block the plan names for a place; -1: none."""
    found = np.empty(devices.shape, dtype=np.int64)
    found[:] = np.arange(devices.shape[1])
    others = (devices != named).any(axis=1).nonzero()[0]
    if not len(others):
        return found
    as_named = devices[others][:, :, None] == named[others][:, None, :]
    found[others] = np.where(as_named.any(axis=1), as_named.argmax(axis=1), -1)
    return found


def _homes(overlap: Ints, held: Ints, wanted: Ints, run: Ints) -> Ints:
    """Block → the node whose devices take it. `run` is (what it holds, what it is, its unit) of each of some nodes."""
    has, takes, unit = run
    if len(held) > len(has):  # most are of other runs
        some, has = np.unique(has, return_inverse=True)
        held = held[some]
    if len(wanted) > len(takes):
        some, takes = np.unique(takes, return_inverse=True)
        wanted = wanted[some]
    worth = _worth(overlap, held, wanted)
    if worth[has, takes].sum() >= min(worth.max(axis=1)[has].sum(), worth.max(axis=0)[takes].sum()):
        return np.arange(len(unit))
    # Among equals the node that the plan names wins, then a node of the same unit.
    near = (unit[:, None] == unit) + np.eye(len(unit), dtype=np.int64)
    rows, columns = linear_sum_assignment(worth[has[:, None], takes] * 4 + near, maximize=True)
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
        for node, block in np.argwhere((at[:, :, 1:] == at[:, :, :-1]).any(axis=2)).tolist():
            taken = linear_sum_assignment(tables[node, block], maximize=True)
            found[first + node, block] = tables[node, block][taken].sum()
    return found


def distinct(rows: Ints) -> tuple[Ints, Ints]:
    """The distinct rows, and the number of each row."""
    if len(rows) <= FEW:
        as_bytes = np.dtype((np.void, rows.shape[1] * rows.itemsize))
        data: list[bytes] = np.ascontiguousarray(rows).view(as_bytes).ravel().tolist()  # type: ignore[assignment]
        number: dict[bytes, int] = {}
        numbers = np.array([number.setdefault(row, len(number)) for row in data])
        return np.frombuffer(b"".join(number), dtype=rows.dtype).reshape(-1, rows.shape[1]), numbers
    mixed = rows.astype(np.uint64) @ np.full(rows.shape[1], MIXER).cumprod()
    _, first, found = np.unique(mixed, return_index=True, return_inverse=True)
    if np.array_equal(rows[first][found], rows):
        return rows[first], found
    some, found = np.unique(rows, axis=0, return_inverse=True)  # rows that differ have been mixed to one number
    return some, found.reshape(-1)


def groups(rows: Ints) -> list[Ints]:
    """The numbers of the rows that are equal, for each distinct row."""
    found, numbers = distinct(rows)
    return np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers, minlength=len(found)))[:-1])
