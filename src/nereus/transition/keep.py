"""Which existing units a goal of the same layout keeps, each in the place of which of its units."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from nereus.transition.deal import distinct
from nereus.transition.profile import Ints
from nereus.transition.rows import Lookup, looked_up


def keep(units: Ints, slots: Ints, nodes: Lookup) -> Ints:
    """(slots,): the unit that takes each slot, -1: none. `units` and `slots` are rows of as many devices each.

    First where the devices are the same, then where they are all in some slot: in the slot that shares most devices
    among those whose devices are on the same nodes, position by position.
    """
    owner = np.repeat(np.arange(len(slots)), slots.shape[1])
    slot_of = looked_up(units, slots.ravel(), owner, -1)
    """(units, positions): the slot that each device is in."""
    inside = (slot_of >= 0).all(axis=1)
    same = inside & (slot_of == slot_of[:, :1]).all(axis=1)
    found = np.full(len(slots), -1, dtype=np.int64)
    found[slot_of[same, 0]] = np.flatnonzero(same)
    rest, unfilled = np.flatnonzero(inside & ~same), np.flatnonzero(found < 0)
    if len(rest) and len(unfilled):
        _fill(found, rest, unfilled, slot_of, _patterns(units[rest], slots[unfilled], nodes))
    return found


def _fill(found: Ints, rest: Ints, unfilled: Ints, slot_of: Ints, patterns: tuple[Ints, Ints]) -> None:
    """Give the units `rest` one after another the nearest of the `unfilled` slots that are left."""
    left: dict[int, dict[int, None]] = defaultdict(dict)
    """Pattern of nodes → the slots of it, in order."""
    for slot, pattern in zip(unfilled.tolist(), patterns[1].tolist(), strict=True):
        left[pattern][slot] = None
    for unit, pattern in zip(rest.tolist(), patterns[0].tolist(), strict=True):
        slots = left[pattern]
        if slots:
            shared = Counter(slot for slot in slot_of[unit].tolist() if slot in slots)
            slot = max(shared, key=lambda slot: (shared[slot], -slot), default=next(iter(slots)))
            found[slot] = unit
            del slots[slot]


def _patterns(units: Ints, slots: Ints, nodes: Lookup) -> tuple[Ints, Ints]:
    """Numbers for rows of devices, equal where all positions are on the same nodes."""
    _, numbers = distinct(nodes(np.concatenate([units, slots])))
    return numbers[: len(units)], numbers[len(units) :]
