"""Where the devices of a transition are: their nodes and kinds, and how much slower nodes reach each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nereus.core import EMU, Cluster
from nereus.transition.nodes import node_at, nodes_at


@dataclass(frozen=True, slots=True)
class Site:
    """Device → its node, and its kind where there are several. What crosses nodes takes `far` times as long.

    No device has a node: all are near.
    """

    node_of: Mapping[int, int] = field(default_factory=dict)
    kind_of: Mapping[int, str] = field(default_factory=dict)
    far: float = 1.0

    @classmethod
    def of(cls, cluster: Cluster) -> Site:
        """The site of all devices of a cluster."""
        mixed = len(cluster.kinds) > 1
        return cls(
            {device.id: device.node for device in cluster.devices},
            {device.id: device.kind for device in cluster.devices} if mixed else {},
            max(1.0, cluster.links["intra"].bytes_per_s / cluster.links["inter"].bytes_per_s),
        )

    def node(self, unit: EMU) -> int:
        """Where its first device is."""
        return node_at(unit.devices[0], self.node_of) if self.node_of else -1

    def cross(self, units: Iterable[EMU]) -> bool:
        """Whether units lie on more than one node."""
        return len(self.nodes(units)) > 1

    def nodes(self, units: Iterable[EMU]) -> set[int]:
        """The nodes on which some units lie."""
        return nodes_at((device for unit in units for device in unit.devices), self.node_of) if self.node_of else {-1}
