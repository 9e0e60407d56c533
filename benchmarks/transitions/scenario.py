"""From which units to which: the devices of both, the least that must travel, and a plain list of what does.

Worked out from intervals alone, apart from the engine: it is what the engine's own counts are held against.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import linear_sum_assignment

from benchmarks.transitions.state import ITEM_BYTES, KINDS, Size, Tensor, Units


@dataclass(frozen=True, slots=True)
class Exchange:
    """Indices [start, stop) of the cut dim of a tensor, every kind of it."""

    tensor: Tensor
    start: int
    stop: int
    source: int
    target: int

    @property
    def bytes(self) -> int:
        """All kinds together."""
        return (self.stop - self.start) * self.tensor.row_elements * ITEM_BYTES * len(KINDS)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One change of layout. The target names devices in the order a tool that keeps ranks in place would use."""

    name: str
    size: Size
    source: Units
    target: Units

    @property
    def devices(self) -> int:
        """Number of devices, sources and targets together."""
        return 1 + max(device for units in (self.source, self.target) for unit in units.devices for device in unit)

    @property
    def placed(self) -> Units:
        """The target with its positions dealt to its devices so that the least has to travel."""
        devices = [device for unit in self.target.devices for device in unit]
        size = self.target.tp * self.target.pp
        kept = np.array([[self._overlap(device, index % size) for index in range(len(devices))] for device in devices])
        in_order = kept * len(devices) + np.eye(len(devices), dtype=np.int64)  # among equals the order stays
        rows, columns = linear_sum_assignment(in_order, maximize=True)
        at = {int(column): devices[int(row)] for row, column in zip(rows, columns, strict=True)}
        units = tuple(tuple(at[first + index] for index in range(size)) for first in range(0, len(devices), size))
        return Units(self.target.tp, self.target.pp, units)

    def _overlap(self, device: int, index: int) -> int:
        """Bytes of a position of the target that a device has already."""
        wanted = Units(self.target.tp, self.target.pp, (tuple(range(self.target.tp * self.target.pp)),))
        mine = {tensor.name: (start, stop) for tensor, start, stop in self.source.held(self.size, device)}
        rows = 0
        for tensor, start, stop in wanted.held(self.size, index):
            low, high = mine.get(tensor.name, (0, 0))
            rows += max(0, min(stop, high) - max(start, low)) * tensor.row_elements
        return rows * ITEM_BYTES * len(KINDS)

    @property
    def minimum_bytes(self) -> int:
        """M*: what the target devices lack of what they shall hold, positions dealt best."""
        return sum(each.bytes for each in self.exchanges())

    def exchanges(self) -> list[Exchange]:
        """What travels to the placed target: each piece once, from the owner that has sent least so far."""
        placed = self.placed
        every = sorted({device for unit in self.source.devices for device in unit})
        owned = {device: {t.name: (a, b) for t, a, b in self.source.held(self.size, device)} for device in every}
        sent: Counter[int] = Counter()
        found: list[Exchange] = []
        for target in sorted(device for unit in placed.devices for device in unit):
            for tensor, start, stop in placed.held(self.size, target):
                own = owned.get(target, {}).get(tensor.name, (0, 0))
                marks = {m for ranges in owned.values() for m in ranges.get(tensor.name, ())}
                cuts = sorted({start, stop, *(m for m in marks if start < m < stop)})
                for low, high in pairwise(cuts):
                    if own[0] <= low and high <= own[1]:
                        continue
                    holds = [d for d in every if _covers(owned[d].get(tensor.name), low, high)]
                    source = min(holds, key=lambda device: (sent[device], device))
                    found.append(Exchange(tensor, low, high, source, target))
                    sent[source] += found[-1].bytes
        return found

    def copies(self) -> dict[int, int]:
        """New device → the source device whose shard it takes whole, where the layout stays; sources take turns."""
        if (self.source.tp, self.source.pp) != (self.target.tp, self.target.pp):
            raise ValueError(f"{self.name}: the layout changes, so no shard is copied whole")
        old = {device for unit in self.source.devices for device in unit}
        new = [unit for unit in self.placed.devices if not old & set(unit)]
        pairs = ((unit, self.source.devices[index % len(self.source.devices)]) for index, unit in enumerate(new))
        return {target: source for unit, twin in pairs for target, source in zip(unit, twin, strict=True)}

    def to_json(self) -> str:
        """As one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """What `to_json` wrote."""
        told = json.loads(text)
        source, target = (
            Units(each["tp"], each["pp"], tuple(tuple(unit) for unit in each["devices"]))
            for each in (told["source"], told["target"])
        )
        return cls(told["name"], Size(**told["size"]), source, target)


def units(tp: int, pp: int, dp: int, first: int = 0) -> Units:
    """Replicas on consecutive devices."""
    size = tp * pp
    return Units(tp, pp, tuple(tuple(range(first + i * size, first + (i + 1) * size)) for i in range(dp)))


def _covers(owned: tuple[int, int] | None, low: int, high: int) -> bool:
    return owned is not None and owned[0] <= low and high <= owned[1]
