"""torch's distributed checkpoint through a RAM disk: written under the source's layout, read under the target's."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.transitions.scenario import Scenario
from benchmarks.transitions.state import KINDS, State, Units, filled, wrong


class Work:
    """DTensors on one mesh a pipeline stage. The target's tensors exist before the clock starts, as users keep them.

    A replica other than the first loads the same files; it is the first that writes.
    """

    def __init__(self, rank: int, scenario: Scenario) -> None:
        self.rank, self.scenario = rank, scenario
        self.folder = Path(tempfile.gettempdir()) / "checkpoint"
        self.source = self._tensors(scenario.source, filled(scenario.size, scenario.source, rank))
        empty = {key: torch.full_like(part, -1.0) for key, part in filled(scenario.size, scenario.target, rank).items()}
        self.target = self._tensors(scenario.target, empty)

    def _tensors(self, units: Units, state: State) -> dict[str, Any]:
        mine: DeviceMesh | None = None
        for unit in units.devices:
            for first in range(0, len(unit), units.tp):
                ranks = list(unit[first : first + units.tp])
                mesh = DeviceMesh("cpu", ranks)
                mine = mesh if self.rank in ranks else mine
        dims = {tensor.name: tensor.dim for tensor in self.scenario.size.tensors}
        found = {}
        for (name, kind), part in state.items():
            placements = [Replicate() if dims[name] is None else Shard(dims[name])]
            found[f"{name} {kind}"] = DTensor.from_local(part, mine, placements, run_check=False)
        return found

    def reset(self) -> None:
        """Remove the files of the last run."""
        distributed.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self) -> None:
        """Save, then load."""
        checkpoint.save(self.source, checkpoint_id=self.folder)
        checkpoint.load(self.target, checkpoint_id=self.folder)

    def wrong(self) -> list[str]:
        """Of the target."""
        state: State = {}
        for tensor, _, _ in self.scenario.target.held(self.scenario.size, self.rank):
            for kind in KINDS:
                state[tensor.name, kind] = self.target[f"{tensor.name} {kind}"].to_local()
        return wrong(state, self.scenario.size, self.scenario.target, self.rank)
