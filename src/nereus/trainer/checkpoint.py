"""Checkpoints: one safetensors file per shard and a manifest with the layout, readable into any layout (D5.13).

Written under a temporary name and renamed when complete, so that a directory with a manifest is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from nereus.core import EMU, Kind, LogicalState, ModelStage, NereusError, SettingsError, StateSchema, TensorSpec, codec
from nereus.core.model_dir import header
from nereus.engine.positions import TORCH_DTYPES, Position
from nereus.trainer.table import Array, SampleTable

MANIFEST = "manifest.json"
DTYPES = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""What safetensors calls them."""
TABLE = "table.safetensors"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds. `units` and `logical` are by trained model-stage; `step` counts finished RL steps."""

    step: int
    position: int
    units: Mapping[ModelStage, EMU]
    logical: Mapping[ModelStage, LogicalState]
    seed: int


def shard_name(model_stage: ModelStage, pp_rank: int, tp_rank: int) -> str:
    """File name of one shard."""
    return f"{model_stage.model}-{model_stage.stage}-pp{pp_rank}-tp{tp_rank}.safetensors"


def write_shard(directory: Path, position: Position, device: int) -> None:
    """Write what one device holds of a unit."""
    tensors = {
        f"{kind}/{name}": tensor.detach().contiguous().cpu() for (name, kind), tensor in position.tensors.items()
    }
    name = shard_name(position.unit.model_stage, *position.unit.position(device))
    try:
        save_file(tensors, str(directory / name))
    except (SafetensorError, OSError) as error:  # a full disk
        raise NereusError(f"{directory / name}: cannot be written: {error}") from None


@contextmanager
def writing(final: Path) -> Iterator[Path]:
    """A new temporary directory beside the final one, for `complete`; nothing of it stays when the block fails."""
    temporary = final.with_name(f".{final.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def complete(temporary: Path, final: Path, manifest: Manifest, table: SampleTable | None) -> None:
    """Write the manifest (and the table of an unfinished step) and give the directory its final name."""
    if table is not None:
        columns = {name: np.asarray(column, order="C") for name, column in table.columns.items()}
        save_arrays({**columns, "sample_ids": table.sample_ids}, temporary / TABLE)
        progress = {"step": table.step, "done": sorted(table.done), "updates": table.updates}
        (temporary / "table.json").write_text(json.dumps(progress))
    with open(temporary / MANIFEST, "w") as file:
        json.dump(codec.encode(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)


def latest(run: Path) -> Path:
    """The newest complete checkpoint of a run. Raises SettingsError when there is none."""
    found = sorted(
        (
            path
            for path in (run / "checkpoints").glob("step-*")
            if (path / MANIFEST).is_file() and _step(path).isdecimal()
        ),
        key=lambda path: int(_step(path)),
    )
    if not found:
        raise SettingsError(f"{run}: no complete checkpoint under {run / 'checkpoints'} to resume from")
    return found[-1]


def _step(path: Path) -> str:
    return path.name.removeprefix("step-")


def read_manifest(directory: Path) -> Manifest:
    """Read and check a checkpoint directory. Raises SettingsError naming what is missing."""
    path = directory / MANIFEST
    if not path.is_file():
        raise SettingsError(f"{directory}: no {MANIFEST}, the checkpoint is incomplete")
    try:
        manifest: Manifest = codec.decode(Manifest, json.loads(path.read_text()))
    except ValueError as error:
        raise SettingsError(f"{path}: not JSON: {error}") from None
    for model_stage, unit in manifest.units.items():
        for device in unit.devices:
            shard = directory / shard_name(model_stage, *unit.position(device))
            if not shard.is_file():
                raise SettingsError(f"{directory}: shard {shard.name} is missing, the checkpoint is incomplete")
    return manifest


def check(directory: Path, schemas: Mapping[ModelStage, StateSchema], seed: int) -> None:
    """Raise SettingsError for a checkpoint that is broken or that a job of these schemas and seed cannot go on from."""
    manifest = read_manifest(directory)
    if manifest.seed != seed:
        raise SettingsError(
            f"run.seed is {seed}, {directory} was made with {manifest.seed}: samples would repeat or be skipped"
        )
    trained = {ms for ms, schema in schemas.items() if Kind.EXP_AVG in schema.dtypes}
    if trained != set(manifest.units):
        held, needed = (", ".join(sorted(map(str, stages))) for stages in (manifest.units, trained))
        raise SettingsError(f"{directory} holds {held}; this job trains {needed}")
    for model_stage, unit in manifest.units.items():
        for device in unit.devices:
            file = directory / shard_name(model_stage, *unit.position(device))
            stored = {name: (DTYPES.get(tensor.dtype), tensor.shape) for name, tensor in header(file).items()}
            needed_here = _stored(schemas[model_stage], unit, device)
            for name in sorted(stored.keys() | needed_here.keys()):
                if stored.get(name) != needed_here.get(name):
                    raise SettingsError(
                        f"{file}: {name} is {_said(stored.get(name))}, this job needs {_said(needed_here.get(name))}: "
                        "resume with the models and the precision of the run"
                    )


def _stored(schema: StateSchema, unit: EMU, device: int) -> dict[str, tuple[str | None, tuple[int, ...]]]:
    tp, (_, tp_rank) = unit.layout.tp, unit.position(device)
    return {
        f"{kind}/{tensor.name}": (dtype, tensor.local_shape(tp, tp_rank))
        for tensor, _, _ in schema.held(unit, device)
        for kind, dtype in schema.dtypes.items()
    }


def _said(tensor: tuple[str | None, tuple[int, ...]] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


def read_table(directory: Path) -> SampleTable | None:
    """The table of the step that was under way, if one was."""
    if not (directory / "table.json").is_file():
        return None
    progress = json.loads((directory / "table.json").read_text())
    columns: dict[str, Array] = load_arrays(directory / TABLE)
    return SampleTable(
        progress["step"], columns.pop("sample_ids"), columns, set(progress["done"]), dict(progress["updates"])
    )


def fill(directory: Path, source: EMU, schema: StateSchema, position: Position, device: int) -> None:
    """Read into `position` its share of a model-stage stored in `source`'s layout, whatever its own layout."""
    files: dict[str, Any] = {}
    for tensor, start, stop in schema.held(position.unit, device):
        dim = tensor.cut.dim or 0
        for kind in schema.dtypes:
            target = position.tensors[(tensor.name, kind)]
            for low, high, part in _pieces(directory, files, source, schema, tensor, kind, start, stop):
                target.narrow(dim, low - start, high - low).copy_(part)


def parameters(directory: Path, source: EMU, schema: StateSchema) -> Iterator[tuple[str, torch.Tensor]]:
    """Every logical parameter, whole, one at a time."""
    files: dict[str, Any] = {}
    for tensor in schema.tensors:
        dim = tensor.cut.dim or 0
        whole = torch.empty(tensor.shape, dtype=TORCH_DTYPES[schema.dtypes[Kind.PARAM]])
        for low, high, part in _pieces(directory, files, source, schema, tensor, Kind.PARAM, 0, tensor.shape[dim]):
            whole.narrow(dim, low, high - low).copy_(part)
        yield tensor.name, whole


def _pieces(
    directory: Path,
    files: dict[str, Any],
    source: EMU,
    schema: StateSchema,
    tensor: TensorSpec,
    kind: Kind,
    start: int,
    stop: int,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(low, high, data): disjoint ranges of the cut dim that cover [start, stop), read from the shards holding them."""
    dim, layout = tensor.cut.dim or 0, source.layout
    pp_rank = next(rank for rank in range(layout.pp) if layout.holds(tensor, rank, schema.layers))
    covered = start
    for tp_rank in range(layout.tp):
        low, high = tensor.interval(layout.tp, tp_rank)
        low_wanted, high_wanted = max(low, covered), min(high, stop)
        if low_wanted >= high_wanted:
            continue
        name = shard_name(source.model_stage, pp_rank, tp_rank)
        if name not in files:
            files[name] = safe_open(str(directory / name), framework="pt")
        view = files[name].get_slice(f"{kind}/{tensor.name}")
        window = (slice(None),) * dim + (slice(low_wanted - low, high_wanted - low),)
        yield low_wanted, high_wanted, view[window]
        covered = high_wanted
    if covered < stop:
        raise SettingsError(f"{directory}: {tensor.name} ends at {covered} of {stop}, the checkpoint is incomplete")
