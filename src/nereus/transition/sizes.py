"""Bytes that positions store, share and overlap, from tensor classes alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nereus.core import EMU, Layout, StateSchema
from nereus.transition.classes import classes

Position = tuple[Layout, int]
"""A layout and the index of a position in it (pp_rank * tp + tp_rank)."""


def position(unit: EMU, device: int) -> Position:
    """The position of `device` in `unit`, as a key that units of one layout share."""
    return (unit.layout, unit.devices.index(device))


class Sizes:
    """Byte counts for the positions of `layouts`; every kind is counted."""

    def __init__(self, schema: StateSchema, layouts: Iterable[Layout]) -> None:
        self._bytes = schema.element_bytes
        self._classes = classes(schema, tuple(layouts))
        self._stored: dict[Position, int] = {}
        self._shared: dict[tuple[Position, Position], int] = {}
        self._regions: dict[Position, NDArray[np.int64]] = {}
        weights = [len(members.tensors) * members.row_elements * self._bytes for members in self._classes]
        self._row_bytes = np.array(weights, dtype=np.int64)

    def stored(self, at: Position) -> int:
        """Bytes stored at a position, padding included."""
        if at not in self._stored:
            layout, index = at
            pp_rank, rank = divmod(index, layout.tp)
            self._stored[at] = self._bytes * sum(
                len(members.tensors) * _product(members.sample.local_shape(layout.tp, rank))
                for members in self._classes
                if pp_rank in members.holders[layout]
            )
        return self._stored[at]

    def shared(self, old: Position, new: Position) -> int:
        """Bytes of the tensors that the position `new` takes over as they are from `old` on the same device."""
        if (old, new) not in self._shared:
            (before, old_index), (after, new_index) = old, new
            (old_pp, old_rank), (new_pp, new_rank) = divmod(old_index, before.tp), divmod(new_index, after.tp)
            total = 0
            for members in self._classes:
                if old_pp not in members.holders[before] or new_pp not in members.holders[after]:
                    continue
                sample = members.sample
                shape = sample.local_shape(after.tp, new_rank)
                if (
                    sample.interval(before.tp, old_rank) == sample.interval(after.tp, new_rank)
                    and sample.local_shape(before.tp, old_rank) == shape
                ):
                    total += len(members.tensors) * _product(shape)
            self._shared[(old, new)] = total * self._bytes
        return self._shared[(old, new)]

    def owned(self, at: Position) -> int:
        """Bytes of the logical state that a position owns, padding left out."""
        region = self.region(at)
        return int((self._row_bytes * (region[:, 1] - region[:, 0])).sum())

    def region(self, at: Position) -> NDArray[np.int64]:
        """(classes, 2): the interval that a position owns of each class; (0, 0) where it holds none."""
        if at not in self._regions:
            layout, index = at
            pp_rank, rank = divmod(index, layout.tp)
            rows = [
                members.sample.interval(layout.tp, rank) if pp_rank in members.holders[layout] else (0, 0)
                for members in self._classes
            ]
            self._regions[at] = np.array(rows, dtype=np.int64).reshape(-1, 2)
        return self._regions[at]

    def overlaps(self, held: list[Position | None], wanted: list[Position]) -> NDArray[np.int64]:
        """(held, wanted): bytes that a device at a held position (None: nothing) already has of a wanted one."""
        rows, row_of = _distinct(held)
        columns, column_of = _distinct(wanted)
        table = np.zeros((len(rows), len(columns)), dtype=np.int64)
        targets = np.stack([self.region(at) for at in columns if at is not None])
        for index, at in enumerate(rows):
            if at is not None:
                source = self.region(at)
                length = np.minimum(source[:, 1], targets[:, :, 1]) - np.maximum(source[:, 0], targets[:, :, 0])
                table[index] = np.maximum(length, 0) @ self._row_bytes
        found: NDArray[np.int64] = table[np.ix_(row_of, column_of)]
        return found


def _distinct(positions: list[Position | None] | list[Position]) -> tuple[list[Position | None], list[int]]:
    index: dict[Position | None, int] = {}
    places = [index.setdefault(at, len(index)) for at in positions]
    return list(index), places


def _product(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
