"""Hugging Face model directories: read only the slices a position owns, write what transformers loads."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nereus.core import Layout, ModelSpec, SettingsError, TensorSpec
from nereus.core.model_dir import ModelDir
from nereus.trainer.decoder.model import DTYPES

FILE_BYTES = 4 << 30
"""Size beyond which a written model continues in another file."""


def load(
    path: str | Path,
    spec: ModelSpec,
    tensors: Sequence[TensorSpec],
    layout: Layout,
    pp_rank: int,
    tp_rank: int,
    dtype: str | None = None,
    may_lack: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """The local tensors of a position in `dtype` (None: the spec's); padding rows are zero.

    Tensors named in `may_lack` start as zeros when the directory has none. Raises SettingsError naming a tensor that
    is missing or has another shape.
    """
    directory = ModelDir.read(path)
    held = [tensor for tensor in tensors if layout.holds(tensor, pp_rank, spec.layers)]
    directory.check(held, may_lack)
    found = {
        tensor.name: torch.zeros(tensor.local_shape(layout.tp, tp_rank), dtype=DTYPES[dtype or spec.dtype])
        for tensor in held
    }
    by_file: dict[Path, list[TensorSpec]] = {}
    for tensor in held:
        if tensor.name in directory.tensors:
            by_file.setdefault(directory.tensors[tensor.name].file, []).append(tensor)
    for file, inside in by_file.items():
        with safe_open(file, framework="pt") as stored:
            for tensor in inside:
                _fill(found[tensor.name], stored, tensor, *tensor.interval(layout.tp, tp_rank))
    return found


def write(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a model directory under a temporary name and rename it when complete.

    `tensors` are whole tensors; they may be produced one by one, at most `file_bytes` of them are held.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingsError(f"cannot write a model to {path}: it exists and is not empty")
    partial = path.with_name(f"{path.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    for left in partial.iterdir():
        left.unlink()
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_files(partial, tensors, file_bytes)
    partial.rename(path)


def _fill(target: torch.Tensor, stored: Any, tensor: TensorSpec, start: int, stop: int) -> None:
    """Copy the owned index range; the rest of `target` is padding."""
    if tensor.cut.dim is None:
        target.copy_(stored.get_tensor(tensor.name))
        return
    if start == stop:
        return
    before = (slice(None),) * tensor.cut.dim
    part = stored.get_slice(tensor.name)[(*before, slice(start, stop))]
    target[(*before, slice(0, stop - start))].copy_(part)


def _write_files(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], file_bytes: int) -> None:
    pending: dict[str, torch.Tensor] = {}
    written: list[tuple[str, ...]] = []
    total = size = 0

    def flush() -> None:
        save_file(pending, folder / f"part-{len(written)}", metadata={"format": "pt"})
        written.append(tuple(pending))
        pending.clear()

    for name, tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if pending and size + tensor_bytes > file_bytes:
            flush()
            size = 0
        pending[name] = tensor.detach().cpu().contiguous()
        size += tensor_bytes
        total += tensor_bytes
    flush()
    if len(written) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(written):
        file = f"model-{number + 1:05d}-of-{len(written):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
