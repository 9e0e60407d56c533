"""Megatron-core's distributed checkpoint through a RAM disk: saved under the source's layout, loaded into the target's.

It assumes CUDA in three places (a synchronisation, the current device, the device of small tensors that it exchanges);
these are replaced, nothing else is.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch import distributed

from benchmarks.transitions.scenario import Scenario
from benchmarks.transitions.state import KINDS, State, Units, filled, wrong


class Work:
    """The target's tensors exist before the clock starts, as users keep them."""

    def __init__(self, rank: int, scenario: Scenario) -> None:
        _without_cuda()
        logging.disable(logging.WARNING)
        self.rank, self.scenario = rank, scenario
        self.folder = Path(tempfile.gettempdir()) / "checkpoint"
        self.source = filled(scenario.size, scenario.source, rank)
        self.empty = {
            key: torch.full_like(part, -1.0) for key, part in filled(scenario.size, scenario.target, rank).items()
        }
        self.loaded: dict[str, Any] = {}
        self.reset()

    def reset(self) -> None:
        """An empty folder."""
        self.loaded = {}
        distributed.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
        distributed.barrier()

    def run(self) -> None:
        """Save, then load."""
        source, target = (self._sharded(units, state) for units, state in self._sides())
        dist_checkpointing.save(source, str(self.folder), validate_access_integrity=True)
        self.loaded = dist_checkpointing.load(target, str(self.folder), validate_access_integrity=True)

    def wrong(self) -> list[str]:
        """Of the target."""
        state: State = {}
        for tensor, _, _ in self.scenario.target.held(self.scenario.size, self.rank):
            state |= {(tensor.name, kind): self.loaded[f"{tensor.name} {kind}"] for kind in KINDS}
        return wrong(state, self.scenario.size, self.scenario.target, self.rank)

    def _sides(self) -> tuple[tuple[Units, State], tuple[Units, State]]:
        return (self.scenario.source, self.source), (self.scenario.target, self.empty)

    def _sharded(self, units: Units, state: State) -> dict[str, Any]:
        at = units.at(self.rank)
        if at is None:
            return {}
        copy = next(index for index, unit in enumerate(units.devices) if self.rank in unit)
        dims = {tensor.name: tensor.dim for tensor in self.scenario.size.tensors}
        found = {}
        for (name, kind), part in state.items():
            cut = () if dims[name] is None else ((dims[name], at[1], units.tp),)
            replica = (0, at[1] if dims[name] is None else 0, copy)
            key = f"{name} {kind}"
            found[key] = ShardedTensor.from_rank_offsets(key, part, *cut, replica_id=replica)
        return found


def _without_cuda() -> None:
    made = torch.tensor

    def tensor(*arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return made(*arguments, **options)

    torch.tensor = tensor
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_, **__: None
