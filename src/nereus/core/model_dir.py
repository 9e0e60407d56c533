"""What a Hugging Face model directory holds: its config and the header of every safetensors file, no tensor data."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus.core.errors import SettingsError
from nereus.core.spec import TensorSpec

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file; `dtype` as the format spells it (F32, BF16, ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelDir:
    """`config.json` and the tensors of a model directory."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def read(cls, path: str | Path) -> ModelDir:
        """Read the config and all headers. Raises SettingsError naming what is missing or broken."""
        path = Path(path)
        if not path.is_dir():
            raise SettingsError(f"model directory {path} does not exist")
        found: dict[str, StoredTensor] = {}
        for file in _files(path):
            found |= header(file)
        return cls(path, read_config(path / "config.json"), found)

    def check(self, tensors: Sequence[TensorSpec], may_lack: Collection[str] = ()) -> None:
        """Raise SettingsError for the first tensor that is missing or has another shape.

        `may_lack` names tensors that may be absent, such as the scalar head of a critic that starts from a language
        model.
        """
        for tensor in tensors:
            stored = self.tensors.get(tensor.name)
            if stored is None:
                if tensor.name not in may_lack:
                    raise SettingsError(f"model directory {self.path}: tensor {tensor.name} is missing")
            elif stored.shape != tensor.shape:
                raise SettingsError(
                    f"model directory {self.path}: tensor {tensor.name} has shape {list(stored.shape)}, "
                    f"config.json says {list(tensor.shape)}"
                )


def read_config(file: Path) -> dict[str, Any]:
    """A `config.json`. Raises SettingsError when it is missing or no JSON object."""
    return _json(file)


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = _json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise SettingsError(f"{index}: no weight_map")
        return [path / name for name in sorted({str(name) for name in weight_map.values()})]
    return [path / "model.safetensors"]


def _json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"model directory {file.parent}: {file.name} is missing") from None
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{file} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise SettingsError(f"{file}: expected a JSON object, found {type(data).__name__}")
    return data


def header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file. Raises SettingsError when it is not one, or not a whole one."""
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise SettingsError(f"{file}: header of {length:,} bytes, at most {_MAX_HEADER_BYTES:,} are valid")
            entries = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        needed_bytes = 8 + length + max(ends, default=0)
        if file_bytes < needed_bytes:
            raise SettingsError(f"{file} is cut short: {file_bytes:,} bytes, its header says {needed_bytes:,}")
        return {
            name: StoredTensor(file, entry["dtype"], tuple(entry["shape"]))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except FileNotFoundError:
        raise SettingsError(f"model directory {file.parent}: {file.name} is missing") from None
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from None
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingsError(f"{file} is not a safetensors file: {error!r}") from None
