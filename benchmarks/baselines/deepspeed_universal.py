"""DeepSpeed's universal checkpoint: ZeRO-1 saves, its converter rewrites the files, an engine of another layout loads.

Pipeline stages need its PipelineModule, which a model of plain parameters does not have: the source is as many TP ranks
with the rest of the workers as data-parallel ranks, of a state of the same size. The state comes from one Adam step
without learning rate on a known gradient, and is compared to 1e-5.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from benchmarks.transitions.ranks import Ranks
from benchmarks.transitions.scenario import Scenario
from benchmarks.transitions.state import Tensor, values

BUILD = Path(__file__).parents[2] / "build" / "deepspeed"
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", "TORCH_EXTENSIONS_DIR": str(BUILD / "extensions")}
os.environ["PATH"] = f"{BUILD / 'bin'}:{os.environ['PATH']}"  # where its compiler driver is

import deepspeed  # noqa: E402  (reads the environment)
from deepspeed.checkpoint import ds_to_universal  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: E402

SELF = "benchmarks.baselines.deepspeed_universal"
TAG, UNIVERSAL = "t", "t_universal"
WORKERS = 2
"""Processes of the converter."""
SCALE = 1 / 65536
PATTERNS = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [r".*\.o\.weight", r".*\.down\.weight"],
    "tp_replicated_parameter_patterns": [r".*norm\d?\.weight"],
    "vocabulary_parameter_patterns": [],
    "parameter_to_average_patterns": [],
    "pipeline_replicated_parameter_patterns": [],
}


class Side:
    """The engines of both layouts stand before the clock starts."""

    def __init__(self, scenario: Scenario) -> None:
        self.folder = Path(tempfile.gettempdir()) / "universal"
        sizes = [sum(map(len, units.devices)) for units in (scenario.source, scenario.target)]
        self.saving = Ranks(f"{SELF}:Save", scenario, sizes[0], "forkserver")  # forked, its engine waits for ever
        self.loading = Ranks(f"{SELF}:Load", scenario, sizes[1], "forkserver")

    def once(self) -> dict[str, Any]:
        """Save, convert, load: each from the moment when all its ranks are ready."""
        save = self.saving.once()
        began_s = time.perf_counter()
        ds_to_universal.main(
            SimpleNamespace(
                input_folder=str(self.folder / TAG),
                output_folder=str(self.folder / UNIVERSAL),
                num_extract_workers=WORKERS,
                num_merge_workers=WORKERS,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=False,
            )
        )
        convert_s = time.perf_counter() - began_s
        load = self.loading.once()
        parts = {"save_s": save["seconds"], "convert_s": convert_s, "load_s": load["seconds"]}
        return {"seconds": sum(parts.values()), **parts}

    def wrong(self) -> list[str]:
        """Of the target."""
        return self.loading.wrong()

    def rest(self) -> None:
        """Its files go."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """End both sets of ranks."""
        self.saving.close()
        self.loading.close()


class Model(torch.nn.Module):
    """Plain parameters whose gradient is a known number."""

    def __init__(self, scenario: Scenario, tp: int, rank: int) -> None:
        super().__init__()
        self.cuts = {f"{tensor.name}.weight": tensor for tensor in scenario.size.tensors}
        self.gradients: dict[str, torch.Tensor] = {}
        for name, tensor in self.cuts.items():
            at: Any = self
            for each in tensor.name.split("."):
                if not hasattr(at, each):
                    at.add_module(each, torch.nn.Module())
                at = getattr(at, each)
            at.register_parameter("weight", torch.nn.Parameter(weight(tensor, tp, rank)))
            self.gradients[name] = gradient(tensor, tp, rank)

    def forward(self, _: Any) -> torch.Tensor:
        """A loss with that gradient."""
        return sum((part * self.gradients[name]).sum() for name, part in self.named_parameters())


def weight(tensor: Tensor, tp: int, rank: int) -> torch.Tensor:
    """A rank's part of a parameter."""
    return values(tensor, "param", *tensor.interval(tp, rank)).contiguous() * SCALE


def gradient(tensor: Tensor, tp: int, rank: int) -> torch.Tensor:
    """A rank's part of its gradient."""
    return values(tensor, "grad", *tensor.interval(tp, rank)).remainder(1021).contiguous() / 1024


class Grid:
    """What it asks a framework about its groups: tp fastest, then data parallel, no pipeline."""

    def __init__(self, tp: int) -> None:
        self.tp, self.rank, size = tp, distributed.get_rank(), distributed.get_world_size()
        self.dp = size // tp
        self.group: Any = None
        self.across: Any = None
        for ranks in (list(range(first, first + tp)) for first in range(0, size, tp)):
            made = distributed.new_group(ranks)
            self.group = made if self.rank in ranks else self.group
        for ranks in (list(range(first, size, tp)) for first in range(tp)):
            made = distributed.new_group(ranks)
            self.across = made if self.rank in ranks else self.across

    def __getattr__(self, name: str) -> Any:
        """Its accessors by their names."""
        inside, beside = (self.group, self.rank % self.tp, self.tp), (self.across, self.rank // self.tp, self.dp)
        answers = {
            "get_pipeline_model_parallel_rank": 0,
            "get_pipeline_model_parallel_world_size": 1,
        }
        for prefix, found in (("model", inside), ("tensor_model", inside), ("data", beside)):
            for what, answer in zip(("group", "rank", "world_size"), found, strict=True):
                answers[f"get_{prefix}_parallel_{what}"] = answer
        if name not in answers:
            raise AttributeError(name)
        return lambda: answers[name]


class _Engine:
    """One rank's engine."""

    def __init__(self, rank: int, scenario: Scenario, tp: int, universal: bool) -> None:
        logging.disable(logging.WARNING)
        self.scenario, self.tp, self.tp_rank = scenario, tp, rank % tp
        self.folder = Path(tempfile.gettempdir()) / "universal"
        model = Model(scenario, tp, self.tp_rank)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "checkpoint": {"load_universal": universal},
        }
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
        self.engine, *_ = deepspeed.initialize(config=settings, model=model, optimizer=optimizer, mpu=Grid(tp))

    def reset(self) -> None:
        """What is loaded is overwritten; the folder is emptied by the side."""

    def wrong(self) -> list[str]:
        """Nothing to compare where nothing is loaded."""
        return []


class Save(_Engine):
    """The source."""

    def __init__(self, rank: int, scenario: Scenario) -> None:
        super().__init__(rank, scenario, scenario.source.tp, False)
        self.engine.backward(self.engine(None))
        self.engine.step()

    def run(self) -> None:
        """Its own checkpoint."""
        state = {"universal_checkpoint_info": PATTERNS, "iteration": 1}
        self.engine.save_checkpoint(str(self.folder), tag=TAG, client_state=state)


class Load(_Engine):
    """The target."""

    def __init__(self, rank: int, scenario: Scenario) -> None:
        super().__init__(rank, scenario, scenario.target.tp, True)

    def run(self) -> None:
        """The converted one."""
        self.engine.load_checkpoint(str(self.folder), tag=UNIVERSAL, load_optimizer_states=True)

    def wrong(self) -> list[str]:
        """Parameters and moments that differ by more than rounding."""
        found = []
        for name, part in self.engine.module.named_parameters():
            tensor = self.engine.module.cuts[name]
            grad = gradient(tensor, self.tp, self.tp_rank)
            wanted = {
                "param": weight(tensor, self.tp, self.tp_rank),
                "exp_avg": grad * 0.1,
                "exp_avg_sq": grad**2 * 1e-3,
            }
            loaded = {"param": safe_get_full_fp32_param(part)}
            loaded |= {kind: safe_get_full_optimizer_state(part, kind) for kind in ("exp_avg", "exp_avg_sq")}
            for kind, values_ in wanted.items():
                other = loaded[kind]
                if other is None or not torch.allclose(other.view_as(values_), values_, rtol=1e-5, atol=1e-9):
                    found.append(f"{name} {kind}")
        return found
