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
AMPLE = 1 << 60
"""Bytes that no table holds."""


def minimum_bytes(schema: StateSchema, start: Sequence[EMUBlock], goal: Sequence[EMUBlock]) -> int:
    """M*: bytes that must arrive when each device takes the position it already holds most of."""
    return _minimum(schema, start, goal, _held(start, goal))


def composed_bytes(schema: StateSchema, start: Sequence[EMUBlock], goal: Sequence[EMUBlock]) -> int:
    """C: what the paper's composition moves. Split gathers T_sub units on all source devices; Extend copies one unit
    for every T_sub unit's worth of new devices; Destroy and Merge move nothing."""
    return _composed(schema, start, goal, _held(start, goal))


def minimum_and_composed_bytes(
    schema: StateSchema, start: Sequence[EMUBlock], goal: Sequence[EMUBlock]
) -> tuple[int, int]:
    """M* and C."""
    counts = _held(start, goal)
    return _minimum(schema, start, goal, counts), _composed(schema, start, goal, counts)


def _minimum(schema: StateSchema, start: Sequence[EMUBlock], goal: Sequence[EMUBlock], counts: Ints) -> int:
    sizes = sizes_of(schema)
    owned = sum(int(sizes.owned(block.layout).sum()) * len(block.devices) for block in goal)
    (held,) = np.nonzero(counts[:-1])
    if not len(held):
        return owned
    rows = [[sizes.overlap(one.layout, other.layout) for other in goal] for one in start]
    table = np.concatenate([np.concatenate(row, axis=1) for row in rows])
    demand = np.repeat([len(block.devices) for block in goal], [block.layout.size for block in goal])
    return owned - _most(table[held], counts[held], demand)


def _composed(schema: StateSchema, start: Sequence[EMUBlock], goal: Sequence[EMUBlock], counts: Ints) -> int:
    sub, sizes = Layout.common(*(block.layout for block in (*start, *goal))), sizes_of(schema)
    copy = int(sizes.owned(sub).sum())
    gathered = sum(
        max(0, block.layout.size // sub.size * copy - int(sizes.owned(block.layout).sum())) * len(block.devices)
        for block in start
    )
    return gathered + -(-int(counts[-1]) // sub.size) * copy


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
    if _cannot_be_better(table, supply, demand, dealt):
        return common * int((table * dealt).sum())
    rows, columns = np.nonzero(table)
    index = np.arange(len(rows))
    ends = np.concatenate([rows, columns + len(supply)])
    sums = coo_array((np.ones(2 * len(rows)), (ends, np.concatenate([index, index]))))
    worth = table[rows, columns]
    limits = np.concatenate([supply, demand])[: sums.shape[0]]
    found = linprog(-worth / worth.max(), A_ub=sums.tocsr(), b_ub=limits, method="highs-ds")  # type: ignore[call-overload]
    # The corners of this polytope are whole numbers.
    return common * int((np.rint(found.x).astype(np.int64) * worth).sum())


def _greedily(table: Ints, supply: Ints, demand: Ints) -> Ints:
    """(rows, columns): amounts when the most valuable pairs get as much as there is, one after another."""
    left, unmet, dealt = supply.tolist(), demand.tolist(), np.zeros_like(table)
    rows, columns = np.nonzero(table)
    order = np.argsort(-table[rows, columns], kind="stable")
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if left[row] and unmet[column]:
            amount = min(left[row], unmet[column])
            left[row] -= amount
            unmet[column] -= amount
            dealt[row, column] = amount
    return dealt


def _cannot_be_better(table: Ints, supply: Ints, demand: Ints, dealt: Ints) -> bool:
    """Whether prices of rows and columns prove that no other deal is worth more; not proved is not refuted.

    No price is below zero, what is left over costs nothing, and every pair costs at least its worth, dealt ones just
    that. `row` and `column` are the least such prices, those of columns with the other sign.
    """
    row, given = np.zeros(len(supply), dtype=np.int64), dealt > 0
    column = np.where(dealt.sum(axis=0) < demand, 0, -AMPLE)
    for _ in range(sum(table.shape)):
        column = np.maximum(column, np.where(given, row[:, None] - table, -AMPLE).max(axis=0))
        raised = np.maximum(row, (table + column).max(axis=1))
        if np.array_equal(raised, row):
            return bool((column <= 0).all() and not row[dealt.sum(axis=1) < supply].any())
        row = raised
    return False
