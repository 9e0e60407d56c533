"""The configuration keys that an installed framework knows, read from its files without importing it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

FREE: Mapping[str, tuple[str, ...]] = {
    "verl": (
        "actor_rollout_ref.actor.megatron.override_transformer_config.",
        "actor_rollout_ref.ref.megatron.override_transformer_config.",
        "critic.megatron.override_transformer_config.",
        "rollout.",
    )
}
"""Sections that take any key of another library, or that only some of the framework's entry points have."""
VERL = ("_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml")


def keys(framework: str) -> Collection[str] | None:
    """Dotted keys or flags; None when the framework's package is not here or has another form."""
    match framework:
        case "verl":
            files = [path for name in VERL if (path := _inside("verl", "trainer", "config", name))]
            return {key for file in files for key in _flat(yaml.safe_load(file.read_text("utf-8")))} if files else None
        case "openrlhf":
            return _flags(_inside("openrlhf", "cli", "train_ppo_ray.py"))
        case "megatron":
            return _megatron(_inside("megatron", "training", "arguments.py"))
    return None


def _inside(package: str, *parts: str) -> Path | None:
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder, *parts)
        if path.is_file():
            return path
    return None


def _flags(path: Path | None) -> Collection[str] | None:
    """Every literal flag in a source file's argument parser."""
    return set(re.findall(r"[\"'](--[\w.-]+)[\"']", path.read_text("utf-8"))) if path else None


def _megatron(path: Path | None) -> Collection[str] | None:
    """Literal flags, and those that Megatron makes of the fields of its configuration classes."""
    found = _flags(path)
    if path is None or found is None:
        return None
    core = path.parents[1] / "core"
    files = [*path.parent.glob("config/*.py"), *core.glob("*config*.py"), *core.glob("*/*config*.py")]
    fields = {field for file in files for field in re.findall(r"^    (\w+) *: ", file.read_text("utf-8"), re.MULTILINE)}
    return {*found, *(f"--{field.replace('_', '-')}" for field in fields)}


def _flat(data: Any, prefix: str = "") -> list[str]:
    if not isinstance(data, dict):
        return []
    found = []
    for key, value in data.items():
        found += [f"{prefix}{key}", *_flat(value, f"{prefix}{key}.")]
    return found
