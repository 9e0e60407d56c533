"""A model as people give it: a known name, or a directory (or `config.json`) without need of its weights."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from nereus.core import Head, ModelSpec, SettingsError, plugins
from nereus.core.model_dir import read_config
from nereus.core.ports import Family
from nereus.families.models import named

FAMILIES = "nereus.families"


def given(model: str, dtype: str, head: Head = Head.LM) -> ModelSpec:
    """Its sizes, computed in `dtype`. Raises SettingsError with the nearest names, or with what a file lacks."""
    path = Path(model)
    if not os.path.exists(model) and not model.startswith((".", "~", "/")):
        return named(model, dtype, head)
    config = read_config(path if path.is_file() else path / "config.json")
    kind = config.get("model_type")
    if kind not in plugins.names(FAMILIES):
        valid = ", ".join(plugins.names(FAMILIES))
        raise SettingsError(f"model directory {model}: model_type {kind!r} is not supported, valid: {valid}")
    family: Family = plugins.make(FAMILIES, str(kind), {})
    own = family.spec(config)
    return replace(own, dtype=dtype, head=head, tied_embeddings=own.tied_embeddings and head is Head.LM)
