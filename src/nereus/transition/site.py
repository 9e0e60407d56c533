"""Where the devices of a transition are: their nodes and kinds, and how much slower nodes reach each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nereus.core import EMU, Cluster
from nereus.core.sizes import checked
from nereus.transition.nodes import nodes_at


@dataclass(frozen=True, slots=True)
class Spot:
    """Where some devices are: a bit for each device, a bit for each of their nodes, and the node of the first."""

    devices: int
    nodes: int
    node: int


@dataclass(frozen=True, slots=True)
class Site:
    """Device → its node, and its kind where there are several. What crosses nodes takes `far` times as long.

    No device has a node: all are near. `bytes_per_s` is what the fastest link carries; 0: not known.
    """

    node_of: Mapping[int, int] = field(default_factory=dict)
    kind_of: Mapping[int, str] = field(default_factory=dict)
    far: float = 1.0
    bytes_per_s: float = 0.0
    bits: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Device that some spot has → its bit."""
    _node_bits: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _spots: dict[tuple[int, ...], Spot] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checked(self.far, "site: far", 1)
        checked(self.bytes_per_s, "site: bytes_per_s", 1 if self.bytes_per_s > 0 else 0)

    @classmethod
    def of(cls, cluster: Cluster) -> Site:
        """The site of all devices of a cluster."""
        mixed = len(cluster.kinds) > 1
        intra, inter = (cluster.links[name].bytes_per_s for name in ("intra", "inter"))
        return cls(
            {device.id: device.node for device in cluster.devices},
            {device.id: device.kind for device in cluster.devices} if mixed else {},
            max(1.0, intra / inter),
            max(intra, inter),
        )

    def spot(self, devices: tuple[int, ...]) -> Spot:
        """Where the devices of a unit are; found once."""
        found = self._spots.get(devices)
        if found is None:
            found = self._spots[devices] = self._found(devices)
        return found

    def joined(self, units: Iterable[EMU]) -> int:
        """The devices of some units, a bit each."""
        found = 0
        for unit in units:
            found |= self.spot(unit.devices).devices
        return found

    def first(self, devices: Iterable[int], among: int) -> int:
        """The first of some devices that has its bit in `among`."""
        bits = self.bits
        for device in devices:
            if among & bits[device]:
                return device
        raise ValueError(f"none of {list(devices)} has its bit in {among:#x}")

    def _found(self, devices: tuple[int, ...]) -> Spot:
        bits, node_bits = self.bits, self._node_bits
        held = nodes = 0
        for device in devices:
            if device not in bits:
                bits[device] = 1 << len(bits)
            held |= bits[device]
        at = nodes_at(devices, self.node_of) if self.node_of else [-1]
        for node in set(at):
            if node not in node_bits:
                node_bits[node] = 1 << len(node_bits)
            nodes |= node_bits[node]
        return Spot(held, nodes, at[0])

    def nodes(self, units: Iterable[EMU]) -> set[int]:
        """The nodes on which some units lie."""
        if not self.node_of:
            return {-1}
        return {node for unit in units for node in nodes_at(unit.devices, self.node_of)}
