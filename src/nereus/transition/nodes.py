"""On which nodes devices are. One that no node is known of is alone on its own: whatever it exchanges crosses nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def node_at(device: int, node_of: Mapping[int, int]) -> int:
    """The node of a device, less than zero for one of its own."""
    return nodes_at((device,), node_of)[0]


def nodes_at(devices: Iterable[int], node_of: Mapping[int, int]) -> list[int]:
    """Those of several devices."""
    return [node_of.get(device, -1 - device) for device in devices]
