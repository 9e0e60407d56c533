"""Sums and levels by device of many small entries, all devices at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nereus.transition.profile import Ints
from nereus.transition.rows import numbered


def totals(devices: Sequence[int] | Ints, sizes: Sequence[int] | Ints) -> dict[int, int]:
    """Device → the sum of the sizes that are entered for it."""
    where = np.asarray(devices, dtype=np.int64)
    if not len(where):
        return {}
    found, (place,) = numbered([where])
    sums = np.zeros(len(found), dtype=np.int64)
    np.add.at(sums, place, np.asarray(sizes, dtype=np.int64))
    return dict(zip(found.tolist(), sums.tolist(), strict=True))


def highest(devices: Sequence[int], changes: Sequence[int]) -> dict[int, int]:
    """Device → the highest level, counted from nothing, that one of its `changes` raises it to; none: left out."""
    found, starts, ordered = _by_device(devices, changes)
    if not len(starts):
        return {}
    levels = np.cumsum(ordered)
    before = levels[starts] - ordered[starts]
    levels -= np.repeat(before, np.diff(starts, append=len(ordered)))
    raised = np.where(ordered > 0, levels, np.iinfo(np.int64).min)
    most = np.maximum.reduceat(raised, starts)
    risen = np.maximum.reduceat(ordered, starts) > 0
    return dict(zip(found[risen].tolist(), most[risen].tolist(), strict=True))


def _by_device(devices: Sequence[int] | Ints, sizes: Sequence[int] | Ints) -> tuple[Ints, Ints, Ints]:
    """The devices in ascending order, where each one's entries start, and all entries, each device's in order."""
    where = np.asarray(devices, dtype=np.int64)
    order = np.argsort(where, kind="stable")
    where = where[order]
    starts = np.flatnonzero(np.diff(where, prepend=where[:1] - 1))
    return where[starts], starts, np.asarray(sizes, dtype=np.int64)[order]
