"""Whether a transition stays within every device's memory, and how much it uses at most (paper §6.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from nereus.core import EMU, EMUSet, InfeasibleError, ModelStage, StateSchema, TransitionDAG
from nereus.transition.classes import by_layout
from nereus.transition.sizes import sizes_of


def stored_bytes(
    units: EMUSet, schemas: Mapping[ModelStage, StateSchema], other_bytes: Mapping[int, int] | None = None
) -> Counter[int]:
    """Device → bytes of all positions on it, and what else is in use."""
    used = Counter(dict(other_bytes or {}))
    for ms in units.model_stages:
        _add(used, units.of(ms), schemas[ms])
    return used


def _add(used: Counter[int], units: Iterable[EMU], schema: StateSchema) -> None:
    sizes = sizes_of(schema)
    for layout, alike in by_layout(units).items():
        stored = sizes.stored(layout).tolist()
        for unit in alike:
            for device, size in zip(unit.devices, stored, strict=True):
                used[device] = used.get(device, 0) + size


def peak_bytes(
    dag: TransitionDAG,
    schemas: Mapping[ModelStage, StateSchema],
    other_bytes: Mapping[int, int] | None = None,
    buffer_bytes: int = 0,
) -> dict[int, int]:
    """Device → the most it stores during the transition, with `buffer_bytes` while it receives what it has allocated.

    Every device runs its primitives in the listed order, so its level is exact whatever runs elsewhere.
    """
    used = stored_bytes(dag.start, schemas, other_bytes)
    peak = dict(used)
    for device, level in _highest(dag, used, buffer_bytes).items():
        peak[device] = max(peak.get(device, 0), level)
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
    peak = stored_bytes(dag.start, schemas, other_bytes)
    highest = _highest(dag, dict(peak), buffer_bytes)
    missing = {d: level - capacity[d] for d, level in highest.items() if d in capacity and level > capacity[d]}
    if missing:
        device = max(missing, key=lambda d: (missing[d], -d))
        raise InfeasibleError(
            f"the transition needs {capacity[device] + missing[device]:,} bytes on device {device}, "
            f"{missing[device]:,} more than its capacity of {capacity[device]:,}",
            missing,
        )
    for device, level in highest.items():
        peak[device] = max(peak[device], level)
    return dict(peak)


def _highest(dag: TransitionDAG, used: dict[int, int], buffer_bytes: int) -> dict[int, int]:
    """Device → its highest level right after it has allocated something; `used` ends as the level after all."""
    highest: dict[int, int] = {}
    for primitive in dag.primitives:
        for device, wanted in primitive.acquires.items():
            level = used[device] = used.get(device, 0) + wanted
            if wanted and level + buffer_bytes > highest.get(device, 0):
                highest[device] = level + buffer_bytes
        for device, freed in primitive.releases.items():
            used[device] -= freed
    return highest
