"""The devices of a pool in the order plans take them, and its parts of equal nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from nereus.core import Cluster, Plan


@dataclass(frozen=True, eq=False)
class Site:
    """Devices by node, in the order they are taken: larger nodes first. `kinds` has the kind of each node's slowest."""

    nodes: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each node."""
        return tuple(map(len, self.nodes))

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """What parts are made of: nodes, or the devices of a single node."""
        return self.nodes if len(self.nodes) > 1 else tuple((device,) for device in self.nodes[0])

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Every device."""
        return tuple(device for node in self.nodes for device in node)

    @cached_property
    def regular(self) -> bool:
        """Whether any two of its slots are as good as each other."""
        return len(set(self.kinds)) == 1 and len(set(self.sizes)) == 1

    def alike(self) -> tuple[Site, ...]:
        """Its nodes by kind and size, most devices first."""
        found: dict[tuple[str, int], list[int]] = {}
        for index, (node, kind) in enumerate(zip(self.nodes, self.kinds, strict=True)):
            found.setdefault((kind, len(node)), []).append(index)
        parts = [self._of(indices) for indices in found.values()]
        return tuple(sorted(parts, key=lambda part: -len(part.devices)))

    def only(self, wanted: Collection[int]) -> Site:
        """Just some of the devices."""
        kept = set(wanted)
        nodes = [tuple(device for device in node if device in kept) for node in self.nodes]
        pairs = [(node, kind) for node, kind in zip(nodes, self.kinds, strict=True) if node]
        pairs.sort(key=lambda pair: -len(pair[0]))
        return Site(tuple(node for node, _ in pairs), tuple(kind for _, kind in pairs))

    def _of(self, indices: Sequence[int]) -> Site:
        return Site(tuple(self.nodes[index] for index in indices), tuple(self.kinds[index] for index in indices))


def whole(cluster: Cluster, current: Plan | None, first: Iterable[int] = ()) -> Site:
    """The pool: fast kinds first, then larger nodes, then what is in `first`, then what the current plan uses most."""
    uses: dict[int, int] = {}
    for assignment in current.assignments if current else ():
        for device_id in assignment.devices:
            uses[device_id] = uses.get(device_id, 0) + 1
    for device_id in first:
        uses[device_id] = uses.get(device_id, 0) + len(cluster.devices)
    members: dict[int, list[int]] = {}
    for device in cluster.devices:
        members.setdefault(device.node, []).append(device.id)
    speed = {name: kind.speed * max(kind.peak_flops.values()) for name, kind in cluster.kinds.items()}
    slowest = _slowest(cluster, speed) if len(speed) > 1 else dict.fromkeys(members, *speed)

    def key(node: int) -> tuple[float, int, int, int]:
        used = sum(uses.get(device, 0) for device in members[node]) if uses else 0
        return -speed[slowest[node]], -len(members[node]), -used, node

    order = sorted(members, key=key)
    nodes = tuple(_by_use(members[node], uses) for node in order)
    return Site(nodes, tuple(slowest[node] for node in order))


def _by_use(devices: list[int], uses: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sorted(devices, key=lambda device: (-uses.get(device, 0), device)) if uses else sorted(devices))


def _slowest(cluster: Cluster, speed: Mapping[str, float]) -> Mapping[int, str]:
    """The kind of each node's slowest device."""
    kinds: dict[int, set[str]] = {}
    for device in cluster.devices:
        kinds.setdefault(device.node, set()).add(device.kind)
    return {node: min(found, key=speed.__getitem__) for node, found in kinds.items()}
