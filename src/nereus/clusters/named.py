"""Machine types by name, such as `h200x8`: `data/*.yaml`, one type a file, with what was measured of it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable

from nereus.clusters.file import read
from nereus.core import Boundary, Cluster, SettingsError


@dataclass(frozen=True)
class Named:
    """`nodes` machines of a type. `memory` overrides what its file says of one device."""

    type: str
    nodes: int = 1
    memory: str | int | None = None
    _cluster: Cluster = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_cluster", machine(self.type, self.nodes, self.memory))

    def cluster(self) -> Cluster:
        """Every device of every node."""
        return self._cluster

    def available(self, boundary: Boundary) -> frozenset[int]:  # noqa: ARG002
        """Always every device."""
        return frozenset(self._cluster.ids)


def names() -> tuple[str, ...]:
    """Every machine type with its usual number of devices, as `machine` takes it."""
    return tuple(name if name.endswith("x") else f"{name}x{size}" for name, size in sorted(_sizes().items()))


def machine(name: str, nodes: int = 1, memory: str | int | None = None) -> Cluster:
    """`nodes` machines of the type `name`: `h200`, or with another number of devices in each, `h200x4`."""
    sizes = _sizes()
    kind, size = _parts(name)
    if kind not in sizes:
        near = difflib.get_close_matches(name, (*sizes, *names()), 3, 0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise SettingsError(f"cluster {name!r} is unknown, valid: {', '.join(names())}{hint}")
    if nodes < 1:
        raise SettingsError(f"cluster {name!r}: {nodes} nodes, must be at least 1")
    with as_file(_folder() / f"{kind}.yaml") as path:
        try:
            return read(path, nodes, memory, size)
        except SettingsError as error:
            raise SettingsError(f"cluster {name!r}: {error}") from None


def _parts(name: str) -> tuple[str, int | None]:
    """Type and devices a node; a type may itself end in `x`."""
    match = re.fullmatch(r"(.+)x(\d+)", name)
    return (name, None) if name in _sizes() or match is None else (match[1], int(match[2]))


def _folder() -> Traversable:
    return files("nereus.clusters") / "data"


@cache
def _sizes() -> dict[str, int]:
    """Machine type → devices a node."""
    found = {}
    for entry in _folder().iterdir():
        if entry.name.endswith(".yaml"):
            with as_file(entry) as path:
                cluster = read(path)
            found[entry.name.removesuffix(".yaml")] = len(cluster.devices)
    return found
