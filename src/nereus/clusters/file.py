"""A cluster described by a YAML file: machines, how many, their devices and links.

```yaml
nodes: 4
devices_per_node: 8
kind: {name: h200, memory: 141 GB, peak_flops: {bf16: 989e12}, memory_rate: 4.8 TB/s, launch_s: 1e-5}
links: {intra: {rate: 450 GB/s, latency_s: 5e-6}, inter: {rate: 50 GB/s, latency_s: 1e-5}}
```

`most_per_node` says how many there are where fewer are used. A kind may add `host_rate` (one direction to host memory),
`host_memory` (of a node, that may hold state while a transition needs room on devices), and both a kind and a link
`constants` of the cost model by name (`nereus calibrate` writes such a file).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nereus.clusters._constants import KIND_CONSTANTS, LINK_CONSTANTS
from nereus.core import DTYPE_BYTES, Boundary, Cluster, Device, DeviceKind, Link, SettingsError
from nereus.core.sizes import checked, rate_bytes_per_s, size_bytes

PRECISIONS = (*DTYPE_BYTES, "fp4")
"""What `peak_flops` may name."""
MOST_DEVICES = 1 << 17
"""Devices that a cluster may have: plans for more would take minutes."""
_OPTIONAL = ("launch_s", "host_rate", "host_memory", "constants")


@dataclass(frozen=True)
class File:
    """`path` is the YAML file; `nodes` and `memory` override what it says."""

    path: str
    nodes: int | None = None
    memory: str | int | None = None
    _cluster: Cluster = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_cluster", read(Path(self.path), self.nodes, self.memory))

    def cluster(self) -> Cluster:
        """Every device of every node."""
        return self._cluster

    def available(self, boundary: Boundary) -> frozenset[int]:  # noqa: ARG002
        """Always every device."""
        return frozenset(self._cluster.ids)


def read(
    path: Path, nodes: int | None = None, memory: str | int | None = None, devices_per_node: int | None = None
) -> Cluster:
    """The cluster of a file, which the other arguments override. Raises SettingsError naming the file and the key."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"cluster file {path}: cannot be read: {reason}") from None
    except (yaml.YAMLError, ValueError) as error:  # a number with thousands of digits is none
        raise SettingsError(f"cluster file {path}: not YAML: {error}") from None
    except RecursionError:
        raise SettingsError(f"cluster file {path}: not YAML of a cluster: nested too deep") from None
    top = _keys(path, "", data, ("nodes", "devices_per_node", "kind", "links"), ("most_per_node",))
    kind = _kind(path, top["kind"], memory)
    links = _keys(path, "links", top["links"], ("intra", "inter"))
    count = _whole(path, "nodes", top["nodes"] if nodes is None else nodes)
    usual = _whole(path, "devices_per_node", top["devices_per_node"])
    per_node = usual if devices_per_node is None else devices_per_node
    most = _whole(path, "most_per_node", top.get("most_per_node", usual))
    if not 1 <= per_node <= most:
        raise SettingsError(f"{per_node} devices in a node, a {kind.name} node has 1 to {most}")
    if count * per_node > MOST_DEVICES:
        raise SettingsError(
            f"{path}: {count:,} nodes of {per_node} devices, at most {MOST_DEVICES:,} devices are valid"
        )
    devices = tuple(Device(index, index // per_node, kind.name) for index in range(count * per_node))
    return Cluster(devices, {kind.name: kind}, {name: _link(path, name, link) for name, link in links.items()})


def written(cluster: Cluster, heading: Iterable[str] = ()) -> str:
    """A file from which `read` makes the cluster again: one kind of device, numbered node by node."""
    (kind,) = cluster.kinds.values()
    nodes = len({device.node for device in cluster.devices})
    described: dict[str, Any] = {
        "name": kind.name,
        "memory": kind.memory_bytes,
        "peak_flops": {precision: _rounded(peak) for precision, peak in kind.peak_flops.items()},
        "memory_rate": _rounded(kind.memory_bytes_per_s),
        "launch_s": _rounded(kind.launch_s),
    }
    if kind.host_bytes_per_s:
        described["host_rate"] = _rounded(kind.host_bytes_per_s)
    if kind.host_memory_bytes:
        described["host_memory"] = kind.host_memory_bytes
    described["constants"] = {name: _rounded(value) for name, value in kind.constants.items()}
    links = {
        name: {
            "rate": _rounded(link.bytes_per_s),
            "latency_s": _rounded(link.latency_s),
            "constants": {constant: _rounded(value) for constant, value in link.constants.items()},
        }
        for name, link in cluster.links.items()
    }
    top = {"nodes": nodes, "devices_per_node": len(cluster.devices) // nodes, "kind": described, "links": links}
    lines = [f"# {line}\n" for line in heading]
    return "".join(lines) + yaml.safe_dump(top, sort_keys=False)


def _rounded(value: float) -> float:
    """Four digits: no measurement knows more. Whole numbers are stated ones."""
    return value if value == int(value) else float(f"{value:.4g}")


def _kind(path: Path, data: Any, memory: str | int | None) -> DeviceKind:
    kind = _keys(path, "kind", data, ("name", "memory", "peak_flops", "memory_rate"), _OPTIONAL)
    peaks = _keys(path, "kind.peak_flops", kind["peak_flops"], (), PRECISIONS)
    if not peaks:
        raise SettingsError(f"{path}: kind.peak_flops is empty, name at least one of {', '.join(PRECISIONS)}")
    host, room = kind.get("host_rate"), kind.get("host_memory")
    return DeviceKind(
        name=str(kind["name"]),
        memory_bytes=size_bytes(kind["memory"] if memory is None else memory, f"{path}: kind.memory"),
        peak_flops={dtype: _number(path, f"kind.peak_flops.{dtype}", value) for dtype, value in peaks.items()},
        memory_bytes_per_s=rate_bytes_per_s(kind["memory_rate"], f"{path}: kind.memory_rate"),
        launch_s=_number(path, "kind.launch_s", kind.get("launch_s", 1e-5)),
        host_bytes_per_s=0.0 if host is None else rate_bytes_per_s(host, f"{path}: kind.host_rate"),
        host_memory_bytes=0 if room is None else size_bytes(room, f"{path}: kind.host_memory"),
        constants=_constants(path, "kind.constants", kind.get("constants", {}), KIND_CONSTANTS),
    )


def _link(path: Path, name: str, data: Any) -> Link:
    link = _keys(path, f"links.{name}", data, ("rate", "latency_s"), ("constants",))
    rate = rate_bytes_per_s(link["rate"], f"{path}: links.{name}.rate")
    constants = _constants(path, f"links.{name}.constants", link.get("constants", {}), LINK_CONSTANTS)
    return Link(rate, _number(path, f"links.{name}.latency_s", link["latency_s"]), constants)


def _constants(path: Path, where: str, data: Any, valid: Collection[str]) -> dict[str, float]:
    given = _keys(path, where, data, (), tuple(valid))
    return {name: _number(path, f"{where}.{name}", value) for name, value in given.items()}


def _keys(
    path: Path, where: str, data: Any, required: Collection[str], optional: Collection[str] = ()
) -> Mapping[str, Any]:
    """`data` as a mapping with just these keys."""
    valid = (*required, *optional)
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: {where or 'the file'} must be a mapping with the keys {', '.join(valid)}")
    for key in data:
        if key not in valid:
            near = difflib.get_close_matches(str(key), valid, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SettingsError(
                f"{path}: unknown key {key!r} in {where or 'the file'}, valid: {', '.join(valid)}{hint}"
            )
    missing = [key for key in required if key not in data]
    if missing:
        raise SettingsError(f"{path}: {where or 'the file'} lacks {', '.join(missing)}")
    return data


def _number(path: Path, where: str, value: Any) -> float:
    """A positive number; YAML reads `1e-5` as text."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = value
    return float(checked(number, f"{path}: {where}"))


def _whole(path: Path, where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{path}: {where} {value!r} must be a whole number of at least 1")
    return value
