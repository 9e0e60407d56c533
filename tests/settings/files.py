"""Job files and model directories made of headers alone, for tests of settings and of the command line."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import yaml

from nereus.core import Head, ModelSpec
from nereus.families.llama import Llama

SPEC = ModelSpec(
    family="llama",
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_hidden=128,
    vocab=16,
    max_positions=128,
)


def model_dir(
    path: Path, *, head: Head = Head.LM, drop: str = "", shapes: dict[str, list[int]] | None = None, **sizes: int
) -> Path:
    """A model directory whose tensors are all zeros; `drop` leaves one out, `shapes` gives some a wrong shape."""
    spec = replace(SPEC, head=head, **sizes)  # type: ignore[arg-type]
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(Llama().config(spec)))
    entries: dict[str, Any] = {}
    offset = 0
    for tensor in Llama().tensors(spec):
        if tensor.name == drop:
            continue
        shape = (shapes or {}).get(tensor.name, list(tensor.shape))
        end = offset + 4 * prod(shape)
        entries[tensor.name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(offset))
    return path


def job(folder: Path, **changes: Any) -> Path:
    """A PPO job on the counting task with its model directories; `changes` replace or (None) remove whole sections."""
    for role in ("actor", "reward", "critic"):
        if not (folder / role).exists():
            model_dir(folder / role, head=Head.LM if role == "actor" else Head.SCALAR)
    data: dict[str, Any] = {
        "algorithm": {"use": "ppo"},
        "task": {"use": "counting"},
        "models": {role: role for role in ("actor", "reward", "critic")},
        "workload": {"prompts": 16, "mini_batch": 8, "expected_response_tokens": 6},
        "sampling": {"max_response_tokens": 56},
        "reward": {"model_weight": 0.5, "verifier_weight": 0.5},
        "cluster": {"use": "local", "devices": 4, "capacity": "64 MiB", "speed": 0.25},
        "run": {"steps": 3},
    }
    data |= changes
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}))
    return path
