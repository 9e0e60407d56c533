"""The flows of a commit group, found once for all groups that are alike but for their devices (D6.8)."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from operator import attrgetter

from nereus.core import EMU, StateSchema
from nereus.transition.flows import Flow, Job, dealt, moved
from nereus.transition.nodes import nodes_at
from nereus.transition.profile import PerSchema

MOST_POSITIONS = 1 << 16
"""Positions of units, in all patterns that are remembered of one schema."""

_devices = attrgetter("devices")

Pairs = Mapping[tuple[int, int], int]
"""(source, target) → elements of one kind."""


class Pattern:
    """The flows of a job whose devices are numbered in order."""

    def __init__(self, schema: StateSchema, job: Job, lacking: bool, nodes: tuple[int, ...] | None) -> None:
        self._asked = (schema, job, lacking, None if nodes is None else dict(enumerate(nodes)))
        """What `dealt` and `moved` are asked."""
        self.nodes = nodes
        """The node of each device, nodes numbered as they appear, where they are known."""
        self.shares: dict[object, Sequence[Pairs]] = {}
        """How the primitives of a group may divide `pairs` among them."""

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """All flows."""
        return dealt(*self._asked).flows()

    @cached_property
    def pairs(self) -> Pairs:
        """What all flows move."""
        return moved(*self._asked)

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Device → elements of one kind that it receives."""
        found: dict[int, int] = defaultdict(int)
        for (_, target), elements in self.pairs.items():
            found[target] += elements
        return found

    @cached_property
    def by_device(self) -> Mapping[int, Sequence[Flow]]:
        """The flows that a device sends or receives, in order."""
        found: dict[int, list[Flow]] = defaultdict(list)
        for flow in self.flows:
            for end in {flow.source, flow.target}:
                found[end].append(flow)
        return found

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal flows in the same order."""
        found = hashlib.sha256()
        for flow in self.flows:
            ends = (flow.start, flow.stop, flow.source, flow.target)
            found.update(f"{flow.tensors[0].name} {flow.tensors[-1].name} {len(flow.tensors)} {ends}".encode())
        return found.digest()


@dataclass(frozen=True, slots=True)
class Exchange:
    """The flows of one job: those of its pattern, between `devices` in ascending order."""

    pattern: Pattern
    devices: tuple[int, ...]

    def flows(self, device: int | None = None) -> Iterator[Flow]:
        """All flows, or those that a device sends or receives."""
        found: Sequence[Flow] = self.pattern.flows
        if device is not None:
            found = self.pattern.by_device.get(self.devices.index(device), ()) if device in self.devices else ()
        for flow in found:
            ends = (self.devices[flow.source], self.devices[flow.target])
            yield Flow(flow.tensors, flow.row_elements, flow.start, flow.stop, *ends)


class Exchanges:
    """The patterns of one schema."""

    def __init__(self, schema: StateSchema) -> None:
        self._schema = schema
        self._known: dict[object, Pattern] = {}
        self._positions = 0

    def of(self, job: Job, lacking: bool = True, node_of: Mapping[int, int] | None = None) -> Exchange:
        """The exchange of a job; the order of its units does not matter."""
        sources, targets = _sorted(job.sources), _sorted(job.targets)
        units = (*sources, *targets)
        flat = [device for unit in units for device in unit.devices]
        devices = tuple(sorted(set(flat)))
        places = tuple(map(dict(zip(devices, count(), strict=False)).__getitem__, flat))
        nodes = numbered(devices, node_of) if node_of else None
        key = (len(sources), *(unit.layout for unit in units), places, nodes, lacking)
        pattern = self._known.get(key)
        if pattern is None:
            rest = iter(places)
            alike = tuple(EMU(unit.model_stage, unit.layout, tuple(islice(rest, len(unit.devices)))) for unit in units)
            asked = Job(alike[: len(sources)], alike[len(sources) :])
            self._positions += len(flat)
            if self._positions > MOST_POSITIONS:
                self._known, self._positions = {}, len(flat)
            pattern = Pattern(self._schema, asked, lacking, nodes)
            self._known[key] = pattern
        return Exchange(pattern, devices)


exchanges_of = PerSchema(Exchanges)


def numbered(devices: Sequence[int], node_of: Mapping[int, int]) -> tuple[int, ...]:
    """The node of each device, nodes numbered as they appear; a device without one is alone on its own."""
    nodes = nodes_at(devices, node_of)
    number = dict(zip(dict.fromkeys(nodes), count(), strict=False))
    return tuple(map(number.__getitem__, nodes))


def _sorted(units: Sequence[EMU]) -> Sequence[EMU]:
    return units if len(units) == 1 else sorted(units, key=_devices)
