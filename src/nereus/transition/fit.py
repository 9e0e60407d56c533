"""Whether a transition stays within every device's memory, and how much it uses at most (paper §6.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from nereus.core import EMU, EMUSet, InfeasibleError, ModelStage, StateSchema, TransitionDAG
from nereus.transition.classes import layouts_of
from nereus.transition.sizes import Sizes, position


def stored_bytes(
    units: EMUSet, schemas: Mapping[ModelStage, StateSchema], other_bytes: Mapping[int, int] | None = None
) -> Counter[int]:
    """Device → bytes of all positions on it, and what else is in use."""
    used = Counter(dict(other_bytes or {}))
    for ms in units.model_stages:
        _add(used, units.of(ms), schemas[ms])
    return used


def _add(used: Counter[int], units: Iterable[EMU], schema: StateSchema) -> None:
    units = tuple(units)
    sizes = Sizes(schema, layouts_of(units))
    for unit in units:
        for device in unit.devices:
            used[device] += sizes.stored(position(unit, device))


def peak_bytes(
    dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema], other_bytes: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Device → the most it stores during the transition.

    Every device runs its primitives in the listed order, so its level is exact whatever runs elsewhere.
    """
    used = stored_bytes(dag.start, schemas, other_bytes)
    peak = dict(used)
    for device, level in _levels(dag, used):
        peak[device] = max(peak.get(device, 0), level)
    return peak


def fit(
    dag: TransitionDAG,
    schemas: Mapping[ModelStage, StateSchema],
    capacity: Mapping[int, int],
    other_bytes: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """The peaks of `dag`. Raises InfeasibleError when an acquisition would pass a device's capacity.

    A device that `capacity` leaves out has no limit.
    """
    missing: dict[int, int] = {}
    for device, level in _levels(dag, stored_bytes(dag.start, schemas, other_bytes)):
        over = level - capacity.get(device, level)
        if over > missing.get(device, 0):
            missing[device] = over
    if missing:
        device = max(missing, key=lambda d: (missing[d], -d))
        raise InfeasibleError(
            f"the transition needs {capacity[device] + missing[device]:,} bytes on device {device}, "
            f"{missing[device]:,} more than its capacity of {capacity[device]:,}",
            missing,
        )
    return peak_bytes(dag, schemas, other_bytes)


def _levels(dag: TransitionDAG, used: Counter[int]) -> Iterator[tuple[int, int]]:
    """(device, bytes in use) after each acquisition that allocates something; updates `used`."""
    for primitive in dag.primitives:
        used.update(primitive.acquires)
        yield from ((device, used[device]) for device, wanted in primitive.acquires.items() if wanted)
        used.subtract(primitive.releases)
