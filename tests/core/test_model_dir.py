"""Model directories are read without tensor data, and what is wrong with one is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from nereus.core import SettingsError, TensorSpec, Where
from nereus.core.model_dir import ModelDir


def header(tensors: dict[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        size = 4
        for length in shape:
            size *= length
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(header({"a": (2, 3), "b": (4,)}))
    return tmp_path


def test_one_file(folder: Path) -> None:
    found = ModelDir.read(folder)
    assert found.config == {"model_type": "llama"}
    assert {name: (stored.dtype, stored.shape) for name, stored in found.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F32", (4,)),
    }


def test_an_index_of_several_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "two.safetensors").write_bytes(header({"c": (1,)}))
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = ModelDir.read(folder)
    assert {name: stored.file.name for name, stored in found.tensors.items()} == weight_map


def test_check_names_what_is_missing_or_misshapen(folder: Path) -> None:
    a, b, c = (TensorSpec(n, shape, Where.FIRST) for n, shape in (("a", (2, 3)), ("b", (4,)), ("c", (1,))))
    found = ModelDir.read(folder)
    found.check([a, b])
    found.check([a, c], may_lack=("c",))
    with pytest.raises(SettingsError, match="tensor c is missing"):
        found.check([a, c])
    with pytest.raises(SettingsError, match=r"tensor b has shape \[4\], config.json says \[5\]"):
        found.check([TensorSpec("b", (5,), Where.FIRST)], may_lack=("b",))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{", "is not JSON"),
        ("config.json", b"[]", "expected a JSON object, found list"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", b"\x01", "is not a safetensors file"),
        ("model.safetensors", struct.pack("<Q", 1 << 60), "at most 100,000,000"),
        ("model.safetensors", struct.pack("<Q", 5) + b"[1,2]", "is not a safetensors file"),
        ("model.safetensors", header({"a": (2, 3), "b": (4,)})[:-1], "is cut short"),
        ("model.safetensors.index.json", b"{}", "no weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}', "3 is missing"),
    ],
)
def test_what_is_broken_is_named(folder: Path, file: str, content: bytes | None, message: str) -> None:
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        ModelDir.read(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_named(folder: Path, file: str) -> None:
    (folder / file).unlink()
    (folder / file).mkdir()
    with pytest.raises(SettingsError, match=f"{file}: cannot be read"):
        ModelDir.read(folder)


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        ModelDir.read(tmp_path / "nowhere")
