"""Blocks of units as arrays of device numbers, and values looked up by device, all devices at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from nereus.core import EMUBlock, Layout, ModelStage
from nereus.transition.profile import Ints

Lookup = Callable[[Ints], Ints]
"""(...,) devices → the number of each, in the same shape."""
SPREAD = 8
"""Device numbers up to so many times their count are looked up in a table, wider spread ones in a sorted list."""


def rows_of(block: EMUBlock) -> Ints:
    """(units, positions): the device of each position."""
    return np.frombuffer(block.flat, dtype=np.int64).reshape(-1, block.layout.size)


def block_of(model_stage: ModelStage, layout: Layout, rows: Ints) -> EMUBlock:
    """The units whose devices are `rows`."""
    return EMUBlock(model_stage, layout, tuple(zip(*[iter(rows.ravel().tolist())] * layout.size, strict=True)))


def looked_up(asked: Ints, keys: Ints, values: Ints, default: int) -> Ints:
    """Of the shape of `asked`: the value of each that is among the distinct `keys`, `default` of others."""
    if not len(keys):
        return np.full(asked.shape, default, dtype=np.int64)
    top = int(keys.max())
    if int(keys.min()) >= 0 and top < SPREAD * (len(keys) + asked.size):
        table = np.full(top + 2, default, dtype=np.int64)
        table[keys] = values
        found: Ints = table[np.where((asked < 0) | (asked > top), top + 1, asked)]
        return found
    order = np.argsort(keys)
    at = np.minimum(np.searchsorted(keys, asked, sorter=order), len(keys) - 1)
    return np.where(keys[order][at] == asked, values[order][at], default)


def runs(ordered: Ints) -> tuple[Ints, Ints]:
    """Where runs of equal neighbours start, and how long they are."""
    starts = np.concatenate([[0], (ordered[1:] != ordered[:-1]).nonzero()[0] + 1])
    ends = np.concatenate([starts[1:], [len(ordered)]])
    return starts, ends - starts


def numbered(rows: Sequence[Ints]) -> tuple[Ints, list[Ints]]:
    """All distinct devices in `rows`, ascending, and the place among them of each in each."""
    low, high = min(int(each.min()) for each in rows), max(int(each.max()) for each in rows)
    if high - low >= SPREAD * sum(each.size for each in rows):
        devices = np.unique(np.concatenate([each.ravel() for each in rows]))
        return devices, [np.searchsorted(devices, each) for each in rows]
    seen = np.zeros(high - low + 1, dtype=np.int64)
    for each in rows:
        seen[each - low] = 1
    place = seen.cumsum() - 1
    return low + np.flatnonzero(seen), [place[each - low] for each in rows]


def held_at(blocks: Sequence[EMUBlock], devices: Ints) -> Ints:
    """Of the shape of `devices`: the position that each holds, counted on over `blocks`; one more: none."""
    places, base = [np.empty(0, dtype=np.int64)], 0
    for block in blocks:
        places.append(np.tile(np.arange(base, base + block.layout.size), len(block.devices)))
        base += block.layout.size
    keys = [places[0], *(rows_of(block).ravel() for block in blocks)]
    return looked_up(devices, np.concatenate(keys), np.concatenate(places), base)


class ByDevice:
    """Whole numbers that a mapping gives of devices; what it leaves out has a number of its own, below zero."""

    def __init__(self, values: Mapping[int, int]) -> None:
        self._keys = np.fromiter(values, dtype=np.int64, count=len(values))
        self._values = np.fromiter(values.values(), dtype=np.int64, count=len(values))

    def __call__(self, devices: Ints) -> Ints:
        """The number of each device."""
        found = looked_up(devices, self._keys, self._values, -1)
        return np.where(found < 0, -1 - devices, found)
