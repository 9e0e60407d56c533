"""This machine's cores as devices: paced CPU workers with a memory capacity each."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nereus.core import Boundary, Cluster, Device, DeviceKind, Link, SettingsError
from nereus.core.sizes import size_bytes

# One core with 8-wide fused multiply-add at 1.5 GHz gives 48 G operations a second, a mark that any x86 or ARM server
# core of the last ten years reaches; calibration corrects it after one step. fp64 is half as wide; bf16 is emulated on
# most CPUs.
PEAK_FLOPS = {"fp32": 5e10, "fp64": 2.5e10, "bf16": 1e10, "fp16": 1e10}
# memcpy of 64 MB by one thread: 3.5-4.8 GB/s on a quiet server.
MEMORY_BYTES_PER_S = 4e9
# What a small tensor operation costs its host thread.
LAUNCH_S = 1.5e-5
# gloo over loopback: 1.8-2.7 GB/s between one pair, less when several pairs talk; 0.1 ms for an empty message.
LOOPBACK = Link(bytes_per_s=1.5e9, latency_s=1e-4)


@dataclass(frozen=True)
class Local:
    """`devices` workers on this machine; `speed` is the share of a core that each may use."""

    devices: int
    capacity: str | int
    speed: float = 1.0
    oversubscribe: bool = False
    host_memory: str | int = 0
    """Memory beside the devices' own that may hold state while a transition needs room on them; 0: none."""
    cores: int | None = None
    """Cores to count with; None: those this process may run on."""

    def __post_init__(self) -> None:
        size_bytes(self.capacity, "cluster: capacity")
        self._host_bytes()
        if self.devices < 1:
            raise SettingsError(f"cluster: {self.devices} devices, must be at least 1")
        if not 0 < self.speed <= 1:
            raise SettingsError(f"cluster: speed {self.speed}, must be above 0 and at most 1 (the share of a core)")
        cores = self.cores or usable_cores()
        if self.devices * self.speed > cores + 1e-9 and not self.oversubscribe:
            raise SettingsError(
                f"cluster: {self.devices} devices x speed {self.speed:g} = {self.devices * self.speed:g} cores, "
                f"{cores} are here: set speed to at most {int(100 * cores / self.devices) / 100:g}, use at most "
                f"{int(cores / self.speed + 1e-9)} devices, or set oversubscribe: true"
            )

    def _host_bytes(self) -> int:
        return 0 if self.host_memory == 0 else size_bytes(self.host_memory, "cluster: host_memory")

    def cluster(self) -> Cluster:
        """Every device, all of one kind on one node."""
        kind = DeviceKind(
            name="cpu",
            memory_bytes=size_bytes(self.capacity, "cluster: capacity"),
            peak_flops=PEAK_FLOPS,
            memory_bytes_per_s=MEMORY_BYTES_PER_S,
            launch_s=LAUNCH_S,
            speed=self.speed,
            host_memory_bytes=self._host_bytes(),
        )
        devices = tuple(Device(index, node=0, kind="cpu") for index in range(self.devices))
        return Cluster(devices, {"cpu": kind}, {"intra": LOOPBACK, "inter": LOOPBACK})

    def available(self, boundary: Boundary) -> frozenset[int]:  # noqa: ARG002
        """Always every device."""
        return frozenset(range(self.devices))


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
