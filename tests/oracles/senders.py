"""How evenly sending can be spread at best: a linear program over single indices, apart from the routes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from nereus.core import EMU, StateSchema


def least_busiest_sender(schema: StateSchema, sources: Sequence[EMU], targets: Sequence[EMU]) -> float:
    """The smallest possible load of the busiest sender, by linear programming over single indices."""
    holders: dict[tuple[str, int], list[int]] = defaultdict(list)
    held: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for unit in sources:
        for device in unit.devices:
            for tensor, start, stop in schema.held(unit, device):
                for index in range(start, stop):
                    holders[tensor.name, index].append(device)
                    held[device].add((tensor.name, index))
    demand: Counter[tuple[int, ...]] = Counter()
    for unit in targets:
        for device in unit.devices:
            for tensor, start, stop in schema.held(unit, device):
                row = tensor.elements // tensor.shape[tensor.cut.dim or 0] * schema.element_bytes
                for index in range(start, stop):
                    if (tensor.name, index) not in held[device]:
                        demand[tuple(sorted(set(holders[tensor.name, index])))] += row
    if not demand:
        return 0.0
    senders = sorted({owner for owners in demand for owner in owners})
    pairs = [(row, owner) for row, owners in enumerate(demand) for owner in owners]
    equal = np.array([[float(row == pair[0]) for pair in pairs] + [0.0] for row in range(len(demand))])
    below = np.array([[float(owner == pair[1]) for pair in pairs] + [-1.0] for owner in senders])
    cost = np.array([0.0] * len(pairs) + [1.0])
    found = linprog(cost, A_ub=below, b_ub=np.zeros(len(senders)), A_eq=equal, b_eq=list(demand.values()))
    assert found.fun is not None
    return float(found.fun)
