"""What a change of one model-stage must move at least (M*), and what the paper's composition moves (C)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import gcd

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import coo_array

from nereus.core import EMU, Layout, StateSchema
from nereus.transition.classes import layouts_of
from nereus.transition.profile import Ints
from nereus.transition.sizes import sizes_of

EXPANDED = 128
"""Up to so many devices, or classes of as many alike, are assigned one by one."""


def minimum_bytes(schema: StateSchema, start: Sequence[EMU], goal: Sequence[EMU]) -> int:
    """M*: bytes that must arrive when each device takes the position it already holds most of."""
    sizes = sizes_of(schema)
    at = {device: (unit.layout, index) for unit in start for index, device in enumerate(unit.devices)}
    held = Counter(at.get(device) for unit in goal for device in unit.devices)
    holders = [entry for entry in held if entry is not None]
    units = Counter(unit.layout for unit in goal)
    if not holders:
        return sum(int(sizes.owned(layout).sum()) * count for layout, count in units.items())
    table = np.concatenate(
        [np.stack([sizes.overlap(old, new)[index] for old, index in holders]) for new in units], axis=1
    )
    supply = np.array([held[entry] for entry in holders])
    demand = np.repeat(list(units.values()), [layout.size for layout in units])
    owned = sum(int(sizes.owned(layout).sum()) * count for layout, count in units.items())
    return owned - _most(table, supply, demand)


def _most(table: Ints, supply: Ints, demand: Ints) -> int:
    """The most that `supply` of each row, given to at most `demand` of each column, is worth by `table`."""
    common = gcd(*supply.tolist(), *demand.tolist())
    supply, demand = supply // common, demand // common
    if max(supply.sum(), demand.sum()) <= EXPANDED:
        rows, columns = (np.repeat(np.arange(len(each)), each) for each in (supply, demand))
        whole = table[np.ix_(rows, columns)]
        return common * int(whole[linear_sum_assignment(whole, maximize=True)].sum())
    rows, columns = np.nonzero(table)
    index = np.arange(len(rows))
    ends = np.concatenate([rows, columns + len(supply)])
    sums = coo_array((np.ones(2 * len(rows)), (ends, np.concatenate([index, index]))))
    worth = table[rows, columns]
    limits = np.concatenate([supply, demand])[: sums.shape[0]]
    found = linprog(-worth / worth.max(), A_ub=sums.tocsr(), b_ub=limits, method="highs-ds")  # type: ignore[call-overload]
    # The corners of this polytope are whole numbers.
    return common * int((np.rint(found.x).astype(np.int64) * worth).sum())


def composed_bytes(schema: StateSchema, start: Sequence[EMU], goal: Sequence[EMU]) -> int:
    """C: what the paper's composition moves. Split gathers T_sub units on all source devices; Extend copies one unit
    for every T_sub unit's worth of new devices; Destroy and Merge move nothing."""
    layouts = layouts_of((*start, *goal))
    sub = Layout(gcd(*(layout.tp for layout in layouts)), gcd(*(layout.pp for layout in layouts)))
    sizes = sizes_of(schema)
    copy = int(sizes.owned(sub).sum())
    gathered = {old: max(0, old.size // sub.size * copy - int(sizes.owned(old).sum())) for old in layouts_of(start)}
    held = {device for unit in start for device in unit.devices}
    new = {device for unit in goal for device in unit.devices} - held
    return sum(gathered[unit.layout] for unit in start) + -(-len(new) // sub.size) * copy
