"""Devices and the links between them (P_gpu, paper §4.1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from nereus.core.errors import SettingsError
from nereus.core.sizes import LEAST, MOST_BYTES, checked


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One type of device. `peak_flops` maps a dtype to operations per second."""

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float = 1e-5
    """Fixed host cost of one operation."""
    speed: float = 1.0
    """Share of a core for a paced local device (D5.11); 1 elsewhere."""
    host_bytes_per_s: float = 0.0
    """Rate of one direction to host memory; 0 where nothing can be offloaded."""
    host_memory_bytes: int = 0
    """Host memory of its node that may hold state while a transition needs room on devices; 0: none."""
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Fitted constants of the cost model by name; those not given take its conservative start values."""

    def __post_init__(self) -> None:
        where = f"device kind {self.name}:"
        checked(self.memory_bytes, f"{where} memory_bytes", 1, MOST_BYTES)
        checked(self.memory_bytes_per_s, f"{where} memory_bytes_per_s", 1)
        checked(self.speed, f"{where} speed", most=1)
        checked(self.launch_s, f"{where} launch_s", 0)
        checked(self.host_memory_bytes, f"{where} host_memory_bytes", 0, MOST_BYTES)
        checked(self.host_bytes_per_s, f"{where} host_bytes_per_s", 1 if self.host_bytes_per_s > 0 else 0)
        for dtype, peak in self.peak_flops.items():
            checked(peak, f"{where} peak_flops of {dtype}", 1)
        _check_constants(self.constants, where)


@dataclass(frozen=True, slots=True)
class Device:
    """What the paper counts as a GPU."""

    id: int
    node: int
    kind: str


@dataclass(frozen=True, slots=True)
class Link:
    """Achievable bandwidth of one direction between two devices, and the time of an empty message."""

    bytes_per_s: float
    latency_s: float
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Fitted constants of the cost model by name, such as how an all-reduce scales with its ranks."""

    def __post_init__(self) -> None:
        checked(self.bytes_per_s, "link: bytes_per_s", 1)
        checked(self.latency_s, "link: latency_s", 0)
        _check_constants(self.constants, "link:")


def _check_constants(constants: Mapping[str, float], where: str) -> None:
    """0 switches a constant off."""
    for name, value in constants.items():
        checked(value, f"{where} {name}", LEAST if value > 0 else 0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices a job may use now. `links` is keyed `intra` (same node) and `inter`."""

    devices: tuple[Device, ...]
    kinds: Mapping[str, DeviceKind]
    links: Mapping[str, Link]

    def __post_init__(self) -> None:
        ids = [device.id for device in self.devices]
        if len(set(ids)) != len(ids):
            raise SettingsError(f"cluster: device ids repeat: {ids}")
        unknown = {device.kind for device in self.devices} - set(self.kinds)
        if unknown:
            raise SettingsError(f"cluster: unknown device kinds {sorted(unknown)}, valid: {sorted(self.kinds)}")
        if not {"intra", "inter"} <= set(self.links):
            raise SettingsError("cluster: links need the keys intra and inter")

    @property
    def ids(self) -> tuple[int, ...]:
        """Device ids in order."""
        return tuple(device.id for device in self.devices)

    def device(self, device_id: int) -> Device:
        """The device with this id."""
        at_its_place = 0 <= device_id < len(self.devices) and self.devices[device_id].id == device_id
        if at_its_place:  # as in every whole pool
            return self.devices[device_id]
        return next(device for device in self.devices if device.id == device_id)

    def kind(self, device_id: int) -> DeviceKind:
        """The kind of a device."""
        return self.kinds[self.device(device_id).kind]

    def host_bytes(self) -> dict[int, int]:
        """Host memory that a transition may use, by node."""
        found: dict[int, int] = {}
        for device in self.devices:
            found[device.node] = max(found.get(device.node, 0), self.kinds[device.kind].host_memory_bytes)
        return {node: size for node, size in found.items() if size}

    def link(self, ids: Collection[int]) -> Link:
        """The slowest link among the devices `ids`."""
        nodes = {self.device(device_id).node for device_id in ids}
        return self.links["intra" if len(nodes) <= 1 else "inter"]

    def without(self, ids: Collection[int]) -> Cluster:
        """The cluster that is left when devices go."""
        gone = set(ids)
        return Cluster(tuple(d for d in self.devices if d.id not in gone), self.kinds, self.links)

    def only(self, ids: Collection[int]) -> Cluster:
        """The cluster of just these devices."""
        kept = set(ids)
        return Cluster(tuple(d for d in self.devices if d.id in kept), self.kinds, self.links)
