"""Which devices each unit gets: TP groups inside a node, replicas packed, devices in use first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from nereus.core import Cluster, Layout, Plan

Units = tuple[tuple[int, ...], ...]


def pool_order(cluster: Cluster, current: Plan | None) -> tuple[int, ...]:
    """Devices in the order plans take them: fast kinds, then nodes and devices that the current plan uses most."""
    uses = dict.fromkeys(cluster.ids, 0)
    for assignment in current.assignments if current else ():
        for device_id in assignment.devices & uses.keys():
            uses[device_id] += 1
    node_uses: dict[int, int] = {}
    for device in cluster.devices:
        node_uses[device.node] = node_uses.get(device.node, 0) + uses[device.id]

    def key(device_id: int) -> tuple[float, int, int, int, int]:
        kind, node = cluster.kind(device_id), cluster.device(device_id).node
        speed = kind.speed * max(kind.peak_flops.values())
        return (-speed, -node_uses[node], node, -uses[device_id], device_id)

    return tuple(sorted(cluster.ids, key=key))


def place(layout: Layout, dp: int, nodes: Sequence[int]) -> Units | None:
    """Units as indices into a window of devices whose nodes are `nodes`; None when a TP group would leave its node."""
    groups: list[tuple[int, ...]] = []
    for _, run in groupby(range(len(nodes)), key=nodes.__getitem__):
        inside = tuple(run)
        whole = len(inside) // layout.tp
        groups += [inside[index * layout.tp : (index + 1) * layout.tp] for index in range(whole)]
    if len(groups) < dp * layout.pp:
        return None
    return tuple(
        tuple(device for group in groups[unit * layout.pp : (unit + 1) * layout.pp] for device in group)
        for unit in range(dp)
    )
