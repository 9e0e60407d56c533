"""Bytes that building a goal unit costs its devices, from what they hold; units alike in both are priced once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from nereus.core import EMU, Layout, StateSchema
from nereus.transition.classes import layouts_of
from nereus.transition.profile import Ints
from nereus.transition.sizes import sizes_of


@dataclass(frozen=True, slots=True)
class Price:
    """`acquired` and `kept` per position: newly allocated bytes, and bytes of storage taken over from the old one.

    `received_bytes` is the most that one position lacks, `moved_bytes` what all lack together.
    """

    acquired: tuple[int, ...]
    kept: tuple[int, ...]
    received_bytes: int
    moved_bytes: int


class Pricing:
    """Prices of the goal units of one model-stage. A device that holds nothing readable acquires all and lacks all."""

    def __init__(self, schema: StateSchema, start: Sequence[EMU], goal: Sequence[EMU], readable: Iterable[EMU]) -> None:
        layouts = layouts_of((*start, *goal))
        self._sizes = sizes_of(schema)
        self._base: dict[Layout, int] = {}
        self._positions: list[tuple[Layout, int]] = []
        for layout in layouts:
            self._base[layout] = len(self._positions)
            self._positions.extend((layout, index) for index in range(layout.size))
        self._held: dict[int, int] = {}
        for unit in readable:
            base = self._base[unit.layout]
            self._held.update(zip(unit.devices, range(base, base + len(unit.devices)), strict=True))
        self._prices: dict[tuple[int, tuple[int | None, ...]], Price] = {}
        self._stored: dict[Layout, tuple[int, ...]] = {}
        self._stored_on: dict[tuple[int, ...], dict[int, int]] = {}
        """Devices of a unit of the start → what it stores on each."""
        self._goal = goal

    @cached_property
    def goal_on(self) -> dict[int, EMU]:
        """Device → the goal unit on it."""
        return {device: unit for unit in self._goal for device in unit.devices}

    def price(self, goal: EMU, held: Collection[int]) -> Price:
        """What `goal` costs on its devices where only those `held` keep what they have until it is built."""
        at = self._held.get
        codes = tuple([at(device) if device in held else None for device in goal.devices]) if held else ()
        key = (self._base[goal.layout], codes)
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self._compute(goal.layout, key[1])
        return found

    def stored(self, layout: Layout) -> tuple[int, ...]:
        """Bytes stored at each position of a layout."""
        found = self._stored.get(layout)
        if found is None:
            found = self._stored[layout] = tuple(self._sizes.stored(layout).tolist())
        return found

    def stored_on(self, unit: EMU) -> dict[int, int]:
        """Bytes that a unit stores, by device; found once."""
        found = self._stored_on.get(unit.devices)
        if found is None:
            found = self._stored_on[unit.devices] = dict(zip(unit.devices, self.stored(unit.layout), strict=True))
        return found

    def unit_bytes(self, layout: Layout) -> int:
        """Bytes of the logical state in all positions of a unit, padding left out."""
        return int(self._sizes.owned(layout).sum())

    def _compute(self, layout: Layout, held: Sequence[int | None]) -> Price:
        acquired, kept, lacking = list(self.stored(layout)), [0] * layout.size, self._sizes.owned(layout).tolist()
        tables: dict[Layout, tuple[Ints, Ints]] = {}
        for index, code in enumerate(held):
            if code is not None:
                old, rank = self._positions[code]
                if old not in tables:
                    tables[old] = self._sizes.shared(old, layout), self._sizes.overlap(old, layout)
                shared, overlap = tables[old]
                kept[index] = int(shared[rank, index])
                acquired[index] -= kept[index]
                lacking[index] -= int(overlap[rank, index])
        return Price(tuple(acquired), tuple(kept), max(lacking), sum(lacking))
