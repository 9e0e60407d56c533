"""What a plan is searched for: the job, the devices, what the job can do, what is known, and what runs now."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nereus.core import Calibration, Capabilities, Cluster, Plan, SettingsError, Workflow, Workload
from nereus.cost.memory import runtime_bytes
from nereus.cost.step import StepModel


@dataclass(frozen=True, slots=True)
class Problem:
    """`headroom` is the share of every device's capacity that a plan leaves free (paper §4.2)."""

    workflow: Workflow
    workload: Workload
    cluster: Cluster
    capabilities: Capabilities
    calibration: Calibration = field(default_factory=Calibration)
    current: Plan | None = None
    headroom: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise SettingsError(f"planner: headroom {self.headroom}, must be at least 0 and below 1")
        if not self.cluster.devices:
            raise SettingsError("planner: the cluster has no devices")

    def model(self) -> StepModel:
        """The cost model of this problem."""
        return StepModel(self.workflow, self.workload, self.cluster, self.calibration)

    def usable_bytes(self, device: int) -> int:
        """What a plan may use of a device, beside what the runtime itself takes."""
        return self.usable(self.cluster.device(device).kind)

    def usable(self, kind: str) -> int:
        """The same for any device of a kind."""
        found = self.cluster.kinds[kind]
        return math.floor(found.memory_bytes * (1 - self.headroom)) - runtime_bytes(found)

    def capacity(self) -> dict[int, int]:
        """The same by device."""
        by_kind = {kind: self.usable(kind) for kind in {device.kind for device in self.cluster.devices}}
        return {device.id: by_kind[device.kind] for device in self.cluster.devices}

    def needed_capacity(self, peak_bytes: int, device: int) -> int:
        """The smallest capacity of a device whose usable part holds `peak_bytes`."""
        return math.ceil((peak_bytes + runtime_bytes(self.cluster.kind(device))) / (1 - self.headroom))
