"""Whether a transition stays within every device's memory, and how much it uses at most (paper §6.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from nereus.core import EMUSet, InfeasibleError, ModelStage, StateSchema, TransitionDAG
from nereus.transition.rows import rows_of
from nereus.transition.sizes import need_schemas, sizes_of
from nereus.transition.totals import highest, totals


def stored_bytes(
    units: EMUSet, schemas: Mapping[ModelStage, StateSchema], other_bytes: Mapping[int, int] | None = None
) -> Counter[int]:
    """Device → bytes of all positions on it, and what else is in use."""
    need_schemas(schemas, units.model_stages)
    blocks = [block for ms in units.model_stages for block in units.blocks(ms)]
    sizes = [np.tile(sizes_of(schemas[each.model_stage]).stored(each.layout), len(each.devices)) for each in blocks]
    nothing = np.empty(0, dtype=np.int64)
    devices = np.concatenate([nothing, *(rows_of(block).ravel() for block in blocks)])
    used = Counter(totals(devices, np.concatenate([nothing, *sizes])))
    for device, size in (other_bytes or {}).items():
        used[device] += size
    return used


def peak_bytes(
    dag: TransitionDAG,
    schemas: Mapping[ModelStage, StateSchema],
    other_bytes: Mapping[int, int] | None = None,
    buffer_bytes: int = 0,
) -> dict[int, int]:
    """Device → the most it stores during the transition, with `buffer_bytes` while it receives what it has allocated.

    Every device runs its primitives in the listed order, so its level is exact whatever runs elsewhere.
    """
    peak = dict(stored_bytes(dag.start, schemas, other_bytes))
    for device, raised in _raised(dag).items():
        if raised + buffer_bytes > 0:
            peak[device] = peak.get(device, 0) + raised + buffer_bytes
    return peak


def fit(
    dag: TransitionDAG,
    schemas: Mapping[ModelStage, StateSchema],
    capacity: Mapping[int, int],
    other_bytes: Mapping[int, int] | None = None,
    buffer_bytes: int = 0,
) -> dict[int, int]:
    """The peaks of `dag`. Raises InfeasibleError when an acquisition would pass a device's capacity.

    A device that `capacity` leaves out has no limit.
    """
    return check(dag, stored_bytes(dag.start, schemas, other_bytes), capacity, buffer_bytes)


def check(
    dag: TransitionDAG, used: Mapping[int, int], capacity: Mapping[int, int], buffer_bytes: int = 0
) -> dict[int, int]:
    """The same from what is `used` at the start, by device."""
    peak = dict(used)
    levels = _highest(dag, used, buffer_bytes)
    missing = {d: level - capacity[d] for d, level in levels.items() if d in capacity and level > capacity[d]}
    if missing:
        device = max(missing, key=lambda d: (missing[d], -d))
        raise InfeasibleError(
            f"the transition needs {capacity[device] + missing[device]:,} bytes on device {device}, "
            f"{missing[device]:,} more than its capacity of {capacity[device]:,}",
            missing,
        )
    for device, level in levels.items():
        peak[device] = max(peak.get(device, 0), level)
    return peak


def _highest(dag: TransitionDAG, used: Mapping[int, int], buffer_bytes: int) -> dict[int, int]:
    """Device → its highest level right after it has allocated something, from what is `used` at the start."""
    return {device: used.get(device, 0) + raised + buffer_bytes for device, raised in _raised(dag).items()}


def _raised(dag: TransitionDAG) -> dict[int, int]:
    """The same from nothing."""
    if dag.lots:
        found: dict[int, int] = {}
        for lot in dag.lots:
            found |= lot.everywhere(_raised(lot.dag))
        return found
    devices: list[int] = []
    changes: list[int] = []
    for primitive in dag.primitives:
        if primitive.acquires:
            devices.extend(primitive.acquires)
            changes.extend(primitive.acquires.values())
        if primitive.releases:
            devices.extend(primitive.releases)
            changes.extend([-freed for freed in primitive.releases.values()])
    return highest(devices, changes)
