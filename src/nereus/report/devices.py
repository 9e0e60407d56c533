"""Device sets in few words, whatever the size of the pool: whole nodes as ranges of nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nereus.core import Assignment, Cluster
from nereus.core.plan import LISTED, listed, ranges

SPANS = 8
"""A line names up to so many ranges of nodes or devices."""


def where(devices: Collection[int], cluster: Cluster, most: int | None = None) -> str:
    """`nodes 0-3` for whole nodes, `devices 0-3 of nodes 0-15` for the same part of several, else `devices 5, 8-9`.

    `most` is how many ranges are named where there are several; of the rest it says how many they are.
    """
    inside, wanted = _inside(cluster), set(devices)
    chosen: dict[int, set[int]] = {}
    for device in cluster.devices:
        if device.id in wanted:
            chosen.setdefault(device.node, set()).add(device.id)
    if len(inside) == 1:
        return f"device{'s' * (len(wanted) > 1)} {_few(wanted, most)}"
    parts: dict[tuple[int, ...] | None, list[int]] = {}
    for node, ids in chosen.items():
        whole = len(ids) == len(inside[node])
        parts.setdefault(None if whole else tuple(sorted(inside[node][i] for i in ids)), []).append(node)
    words = []
    for positions, nodes in parts.items():
        some = f"node{'s' * (len(nodes) > 1)} {_few(nodes, most)}"
        words.append(
            some if positions is None else f"device{'s' * (len(positions) > 1)} {_few(positions, most)} of {some}"
        )
    return ", ".join(words)


def _few(numbers: Collection[int], most: int | None) -> str:
    """Ranges of numbers, the first few of many."""
    spans = ranges(numbers).split(", ")
    if most is None or len(spans) <= most:
        return ", ".join(spans)
    last = int(spans[most - 1].rpartition("-")[2])
    return f"{', '.join(spans[:most])} and {sum(number > last for number in numbers):,} more"


def units(assignment: Assignment, cluster: Cluster) -> str:
    """The devices of a model-stage: `[0,1] [2,3]` in a small pool, in words in a large one."""
    if len(assignment.devices) <= LISTED and len(cluster.devices) <= LISTED:
        return " ".join(f"[{_in_order(unit)}]" for unit in assignment.units)
    return where(assignment.devices, cluster)


def _inside(cluster: Cluster) -> Mapping[int, Mapping[int, int]]:
    """Device → its number inside its node, by node."""
    found: dict[int, dict[int, int]] = {}
    for device in cluster.devices:
        node = found.setdefault(device.node, {})
        node[device.id] = len(node)
    return found


def _in_order(unit: Sequence[int]) -> str:
    """Many devices are a range where their numbers rise: the order is that of the ranks."""
    return listed(unit) if list(unit) == sorted(unit) else ",".join(map(str, unit))
