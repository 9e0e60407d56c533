"""The units that meet on devices that could run short, as bits: who reads whom, who is tied to whom, what each stores.

A goal unit is built together with those that need the same Split as long as the unit to be split is there; what is
built beside an old unit takes over storage from it. Reading an old unit on its own devices is what giving it up loses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nereus.core import EMU, EMUSet, Layout, ModelStage, StateSchema
from nereus.transition.classes import layouts_of
from nereus.transition.decompose import degrees
from nereus.transition.sizes import sizes_of

Levels = dict[int, int]
"""Device → bytes, of the devices that could run short."""


@dataclass(slots=True)
class Place:
    """An old unit that goes, or a goal unit that is built; `meets` has the bits of the other kind on its devices."""

    unit: EMU
    bit: int
    own: int
    """Bits of its model-stage of the same kind."""
    others: int
    """Bits of its model-stage of the other kind."""
    stored: Levels
    meets: int = 0
    overlap: dict[int, int] = field(default_factory=dict)
    """Of an old unit: bit of a goal unit → bytes of it that are on its devices."""
    shared: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of a goal unit: device → bit of the old unit there, bytes of storage that stay as they are."""
    held: dict[int, int] = field(default_factory=dict)
    """Of a goal unit: device that could run short → bytes of it that the old unit there has."""
    safe: bool = False
    """Whether a copy is there that stays."""


class Crowd:
    """All of them. Bits of old units and of goal units are counted apart."""

    def __init__(
        self,
        start: EMUSet,
        goal: EMUSet,
        schemas: Mapping[ModelStage, StateSchema],
        tight: Mapping[int, int],
        other_bytes: Mapping[int, int],
    ) -> None:
        self.tight = tight
        self.level: Levels = {device: other_bytes.get(device, 0) for device in tight}
        """Bytes in use while all old units and no goal unit are there."""
        self.old: list[Place] = []
        self.new: list[Place] = []
        self.split = 0
        """Old units that have to be split."""
        self.on: dict[int, int] = dict.fromkeys(tight, 0)
        """Device → the old units there."""
        self.kept: Levels = dict(self.level)
        """Bytes in use whatever is done."""
        for ms in goal.model_stages:
            self._enter(start, goal, ms, schemas[ms])

    def _enter(self, start: EMUSet, goal: EMUSet, ms: ModelStage, schema: StateSchema) -> None:
        sizes = sizes_of(schema)
        before, after = start.of(ms), goal.of(ms)
        wanted, there = set(after), set(before)
        stored = {layout: sizes.stored(layout).tolist() for layout in layouts_of((*before, *after))}
        sub = Layout.common(*stored)
        left, built = [u for u in before if u not in wanted], [u for u in after if u not in there]
        went, came = (((1 << len(us)) - 1) << len(known) for us, known in ((left, self.old), (built, self.new)))
        safe = len(left) < len(before)
        for unit in before:
            levels = self._levels(unit, stored[unit.layout])
            for device, size in levels.items():
                self.level[device] += size
                if unit in wanted:
                    self.kept[device] += size
        olds: dict[int, tuple[Place, int]] = {}
        for unit in left:
            place = Place(unit, 1 << len(self.old), went, came, self._levels(unit, stored[unit.layout]), safe=safe)
            self.old.append(place)
            self.split |= place.bit if degrees(unit.layout) != degrees(sub) else 0
            for index, device in enumerate(unit.devices):
                olds[device] = place, index
                if device in self.tight:
                    self.on[device] |= place.bit
        for unit in built:
            place = Place(unit, 1 << len(self.new), came, went, self._levels(unit, stored[unit.layout]))
            self.new.append(place)
            for index, device in enumerate(unit.devices):
                if device in olds:
                    old, rank = olds[device]
                    place.meets |= old.bit
                    old.meets |= place.bit
                    ends = old.unit.layout, unit.layout
                    held = int(sizes.overlap(*ends)[rank, index])
                    old.overlap[place.bit] = old.overlap.get(place.bit, 0) + held
                    if device in self.tight:
                        place.held[device] = held
                        place.shared[device] = old.bit, int(sizes.shared(*ends)[rank, index])

    def _levels(self, unit: EMU, stored: list[int]) -> Levels:
        return {d: size for d, size in zip(unit.devices, stored, strict=True) if size and d in self.tight}

    def together(self, first: int, alive: int, built: int) -> int:
        """The goal units that commit with one."""
        group, ties = first, 0
        while True:
            met = 0
            for place in each(self.new, group):
                met |= place.meets
            more = met & alive & self.split & ~ties
            if not more:
                return group
            ties |= more
            for place in each(self.old, more):
                group |= place.meets & ~built

    def wanted(self, group: int, alive: int) -> Levels:
        """What the goal units acquire beside the old units `alive`."""
        found: Levels = {}
        for place in each(self.new, group):
            found.update(place.stored)
            for device, (bit, size) in place.shared.items():
                if bit & alive and device in found:
                    found[device] -= size
        return found

    def freed(self, old: Place, built: int) -> Levels:
        """What the Destroy of an old unit gives back once some goal units are built."""
        found = dict(old.stored)
        for place in each(self.new, old.meets & built):
            for device, (bit, size) in place.shared.items():
                if bit == old.bit and device in found:
                    found[device] -= size
        return found

    def lost(self, old: Place, built: int) -> int:
        """Bytes that goal units not yet built receive more without it."""
        return sum(size for bit, size in old.overlap.items() if not bit & built)

    def may_leave(self, old: Place, alive: int, built: int) -> bool:
        """Whether another copy is there."""
        return old.safe or bool(built & old.others) or bool(alive & old.own & ~old.bit)


def each(places: list[Place], bits: int) -> Iterator[Place]:
    """Those whose bits are set."""
    while bits:
        low = bits & -bits
        yield places[low.bit_length() - 1]
        bits ^= low
