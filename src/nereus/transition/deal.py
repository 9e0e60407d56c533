"""Deals places to devices, node by node, so that most bytes stay where they are; what is alike is dealt once.

The places that a plan puts on one node are a *block*. A block may change nodes as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from scipy.optimize import linear_sum_assignment

from nereus.transition.profile import Ints

WINDOW = 256
"""Up to so many nodes are dealt together; larger pools go in runs of neighbours."""
ELSEWHERE = b"-"
"""Stands for a block whose places are named on another node than the one that takes it."""


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
    free: Sequence[int],
    held: Ints,
    named: Sequence[int],
    overlap: Ints,
    nodes: tuple[Sequence[int], Sequence[int]],
    kinds: Sequence[str] | None = None,
) -> Ints:
    """(places,): the device of each place, from as many `free` ones.

    Places are whole units, one after another; the plan has `named` a device for each. `overlap` is (what is held,
    positions of a unit) in bytes. `nodes` are those of `free` and of `named`; every node has as many of both. Nodes
    of unequal `kinds` do not change places.
    """
    size = overlap.shape[1]
    kinds = None if kinds is None or len(set(kinds)) == 1 else kinds
    by_node, by_place = (np.argsort(np.array(each), kind="stable") for each in nodes)
    edges = [0, *(np.flatnonzero(np.diff(np.array(nodes[0])[by_node])) + 1).tolist(), len(free)]
    alike: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
    for start, stop in pairwise(edges):
        own = tuple(sorted(kinds[index] for index in by_node[start:stop])) if kinds is not None else ()
        alike[stop - start, own].append(start)
    chosen = np.empty(len(free), dtype=np.int64)
    every = (np.array(free)[by_node], held[by_node], by_place, by_place % size, np.array(named)[by_place])
    for (length, _), starts in alike.items():
        index = np.array(starts)[:, None] + np.arange(length)
        blocks = Blocks(*(column[index] for column in every))
        for first in range(0, len(starts), WINDOW):
            _deal(blocks.rows(slice(first, first + WINDOW)), overlap, chosen)
    return chosen


def _deal(blocks: Blocks, overlap: Ints, chosen: Ints) -> None:
    """Enter the devices of these blocks into `chosen`."""
    held, held_id = _distinct(blocks.held)
    wanted, wanted_id = _distinct(blocks.wanted)
    worth = _worth(overlap, held, wanted)[np.ix_(held_id, wanted_id)]
    home = _homes(worth, blocks.places[:, 0] // overlap.shape[1])
    aligned = (blocks.devices == blocks.named).all(axis=1)
    before, after = held_id[home].tolist(), wanted_id.tolist()
    known: dict[tuple[int, int, bytes], list[int]] = defaultdict(list)
    for block, node in enumerate(home.tolist()):
        named = ELSEWHERE if node != block else b"" if aligned[block] else _named(blocks, block)
        known[before[block], after[block], named].append(block)
    length = held.shape[1]
    for (has, takes, named), group in known.items():
        preferred = overlap[held[has]][:, wanted[takes]] * 2
        # Among equals the plan's own order wins: twice the bytes leave room for half a byte of preference.
        if named != ELSEWHERE:
            index = np.frombuffer(named, dtype=np.int64) if named else np.arange(length)
            preferred += np.arange(length)[:, None] == index[None, :]
        rows, columns = linear_sum_assignment(preferred, maximize=True)
        chosen[blocks.places[group]] = blocks.devices[home[group]][:, rows[np.argsort(columns)]]


def _named(blocks: Blocks, block: int) -> bytes:
    """For each place of a block, which device of its node the plan names, as an array; -1 for none."""
    row_of = {device: row for row, device in enumerate(blocks.devices[block].tolist())}
    return np.array([row_of.get(device, -1) for device in blocks.named[block].tolist()], dtype=np.int64).tobytes()


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


def _distinct(rows: Ints) -> tuple[Ints, Ints]:
    """The distinct rows, and the number of each row."""
    data, width = rows.tobytes(), rows.shape[1] * rows.itemsize
    number: dict[bytes, int] = {}
    numbers = [number.setdefault(data[at : at + width], len(number)) for at in range(0, len(data), width)]
    distinct = np.frombuffer(b"".join(number), dtype=rows.dtype).reshape(-1, rows.shape[1])
    return distinct, np.array(numbers)
