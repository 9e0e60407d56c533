"""What a change of one model-stage must move at least (M*), and what the paper's composition moves (C)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from math import gcd

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import coo_array

from nereus.core import EMU, Layout, StateSchema
from nereus.transition.classes import by_layout, layouts_of
from nereus.transition.deal import deal
from nereus.transition.place import overlaps
from nereus.transition.profile import Ints
from nereus.transition.sizes import sizes_of

EXPANDED = 128
"""Up to so many devices, or classes of as many alike, are assigned one by one."""


def minimum_bytes(schema: StateSchema, start: Sequence[EMU], goal: Sequence[EMU]) -> int:
    """M*: bytes that must arrive when each device takes the position it already holds most of."""
    sizes, at = sizes_of(schema), dict[int, int]()
    wanted, old = by_layout(goal), by_layout(start)
    base = 0
    for layout, units in old.items():
        places = cycle(range(base, base + layout.size))
        at.update(zip((device for unit in units for device in unit.devices), places, strict=False))
        base += layout.size
    counts = Counter(at.get(device, base) for unit in goal for device in unit.devices)
    owned = sum(int(sizes.owned(layout).sum()) * len(units) for layout, units in wanted.items())
    held = sorted(counts.keys() - {base})
    if not held:
        return owned
    table = np.concatenate([np.concatenate([sizes.overlap(one, other) for other in wanted], axis=1) for one in old])
    supply = np.array([counts[place] for place in held])
    demand = np.repeat([len(units) for units in wanted.values()], [layout.size for layout in wanted])
    return owned - _most(table[held], supply, demand)


def minimum_on_nodes(schema: StateSchema, start: Sequence[EMU], goal: Sequence[EMU], node_of: Mapping[int, int]) -> int:
    """M* where the positions that `goal`, all of one layout, has on one node stay together on one node."""
    (layout,) = layouts_of(goal)
    devices = [device for unit in goal for device in unit.devices]
    overlap, held = overlaps(start, layout, schema, devices)
    nodes = [node_of[device] for device in devices]
    chosen = deal(devices, held, devices, overlap, (nodes, nodes))
    row_of = dict(zip(devices, held.tolist(), strict=True))
    wanted = int(sizes_of(schema).owned(layout).sum()) * len(goal)
    return wanted - sum(
        int(overlap[row_of[device], place % layout.size]) for place, device in enumerate(chosen.tolist())
    )


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


def composed_bytes(schema: StateSchema, start: Sequence[EMU], goal: Sequence[EMU]) -> int:
    """C: what the paper's composition moves. Split gathers T_sub units on all source devices; Extend copies one unit
    for every T_sub unit's worth of new devices; Destroy and Merge move nothing."""
    sub = Layout.common(*layouts_of((*start, *goal)))
    sizes = sizes_of(schema)
    copy = int(sizes.owned(sub).sum())
    gathered = {old: max(0, old.size // sub.size * copy - int(sizes.owned(old).sum())) for old in layouts_of(start)}
    held = {device for unit in start for device in unit.devices}
    new = {device for unit in goal for device in unit.devices} - held
    return sum(gathered[unit.layout] for unit in start) + -(-len(new) // sub.size) * copy
