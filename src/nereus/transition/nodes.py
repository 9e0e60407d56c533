"""On which nodes devices are. One that no node is known of is alone on its own: whatever it exchanges crosses nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def node_at(device: int, node_of: Mapping[int, int]) -> int:
    """The node of a device, less than zero for one of its own."""
    return node_of.get(device, -1 - device)


def nodes_at(devices: Sequence[int], node_of: Mapping[int, int]) -> list[int]:
    """Those of several devices."""
    try:
        return list(map(node_of.__getitem__, devices))
    except KeyError:  # rare: one is alone
        return [node_at(device, node_of) for device in devices]
