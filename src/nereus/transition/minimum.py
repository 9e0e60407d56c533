"""What a change of one model-stage must move at least (M*), and what the paper's composition moves (C)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import coo_array

from nereus.core import EMUBlock, Layout, StateSchema
from nereus.transition.deal import deal
from nereus.transition.place import overlaps
from nereus.transition.profile import Ints
from nereus.transition.rows import ByDevice, held_at, looked_up, rows_of
from nereus.transition.sizes import sizes_of

EXPANDED = 128
"""Up to so many devices, or classes of as many alike, are assigned one by one."""


def minimum_bytes(schema: StateSchema, start: Sequence[EMUBlock], goal: Sequence[EMUBlock]) -> int:
    """M*: bytes that must arrive when each device takes the position it already holds most of."""
    sizes = sizes_of(schema)
    counts = _held(start, goal)
    owned = sum(int(sizes.owned(block.layout).sum()) * len(block.devices) for block in goal)
    (held,) = np.nonzero(counts[:-1])
    if not len(held):
        return owned
    table = np.block([[sizes.overlap(one.layout, other.layout) for other in goal] for one in start])
    demand = np.repeat([len(block.devices) for block in goal], [block.layout.size for block in goal])
    return owned - _most(table[held], counts[held], demand)


def _held(start: Sequence[EMUBlock], goal: Sequence[EMUBlock]) -> Ints:
    """(positions of `start`, and none): how many devices of `goal` hold each."""
    held = held_at(start, np.concatenate([np.empty(0, dtype=np.int64), *(rows_of(block).ravel() for block in goal)]))
    return np.bincount(held, minlength=sum(block.layout.size for block in start) + 1)


def minimum_on_nodes(schema: StateSchema, start: Sequence[EMUBlock], goal: EMUBlock, node_of: Mapping[int, int]) -> int:
    """M* where the positions that `goal` has on one node stay together on one node."""
    size, devices = goal.layout.size, rows_of(goal).ravel()
    overlap, held = overlaps(start, goal.layout, schema, devices)
    chosen = deal(devices, held, devices, overlap, ByDevice(node_of))
    kept = overlap[looked_up(chosen, devices, held, -1), np.arange(len(chosen)) % size]
    return int(sizes_of(schema).owned(goal.layout).sum()) * len(goal.devices) - int(kept.sum())


def _most(table: Ints, supply: Ints, demand: Ints) -> int:
    """The most that `supply` of each row, given to at most `demand` of each column, is worth by `table`."""
    common = gcd(*supply.tolist(), *demand.tolist())
    supply, demand = supply // common, demand // common
    if max(supply.sum(), demand.sum()) <= EXPANDED:
        rows, columns = (np.repeat(np.arange(len(each)), each) for each in (supply, demand))
        whole = table[np.ix_(rows, columns)]
        return common * int(whole[linear_sum_assignment(whole, maximize=True)].sum())
    dealt = _greedily(table, supply, demand)
    if dealt == min(supply @ table.max(axis=1), demand @ table.max(axis=0)):
        return common * dealt
    rows, columns = np.nonzero(table)
    index = np.arange(len(rows))
    ends = np.concatenate([rows, columns + len(supply)])
    sums = coo_array((np.ones(2 * len(rows)), (ends, np.concatenate([index, index]))))
    worth = table[rows, columns]
    limits = np.concatenate([supply, demand])[: sums.shape[0]]
    found = linprog(-worth / worth.max(), A_ub=sums.tocsr(), b_ub=limits, method="highs-ds")  # type: ignore[call-overload]
    # The corners of this polytope are whole numbers.
    return common * int((np.rint(found.x).astype(np.int64) * worth).sum())


def _greedily(table: Ints, supply: Ints, demand: Ints) -> int:
    """What is reached by giving the most valuable pairs as much as there is, one after another."""
    left, open_, worth = supply.tolist(), demand.tolist(), 0
    rows, columns = np.nonzero(table)
    order = np.argsort(-table[rows, columns], kind="stable")
    rows, columns = rows[order], columns[order]
    for row, column, each in zip(rows.tolist(), columns.tolist(), table[rows, columns].tolist(), strict=True):
        amount = min(left[row], open_[column])
        if amount:
            left[row] -= amount
            open_[column] -= amount
            worth += amount * each
    return worth


def composed_bytes(schema: StateSchema, start: Sequence[EMUBlock], goal: Sequence[EMUBlock]) -> int:
    """C: what the paper's composition moves. Split gathers T_sub units on all source devices; Extend copies one unit
    for every T_sub unit's worth of new devices; Destroy and Merge move nothing."""
    sub, sizes = Layout.common(*(block.layout for block in (*start, *goal))), sizes_of(schema)
    copy = int(sizes.owned(sub).sum())
    gathered = sum(
        max(0, block.layout.size // sub.size * copy - int(sizes.owned(block.layout).sum())) * len(block.devices)
        for block in start
    )
    return gathered + -(-int(_held(start, goal)[-1]) // sub.size) * copy
