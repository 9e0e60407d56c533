"""Well-known models by name: their sizes, so that a plan needs no download."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from nereus.core import Head, ModelSpec, SettingsError

COPIES = ("-instruct", "-base", "-chat", "-it", "-hf", "-thinking", "-fp8", "-bf16")
"""Endings of names of fine-tuned, quantized or converted copies, which have the sizes of the model they come from."""


@dataclass(frozen=True, slots=True)
class Known:
    """A model of the list: its full name, its sizes, and the part of the model that they leave out, if any."""

    name: str
    spec: ModelSpec
    without: str = ""


def named(name: str, dtype: str = "bf16", head: Head = Head.LM) -> ModelSpec:
    """The sizes of a model by a name or path that ends in its name. Raises SettingsError with the nearest names."""
    spec = replace(known(name).spec, dtype=dtype)
    if head is Head.SCALAR:
        return replace(spec, head=head, tied_embeddings=False)
    return spec


def known(name: str) -> Known:
    """The entry of a model. Upper and lower case, owners and the endings of copies do not matter."""
    models, key = _models(), _key(name)
    while key not in models:
        ending = next((copy for copy in COPIES if key.endswith(copy)), None)
        if ending is None:
            near = difflib.get_close_matches(_key(name), models, 3, 0.5)
            found = ", ".join(dict.fromkeys(models[each].name for each in near))
            raise SettingsError(
                f"model {name!r} is unknown; "
                + (
                    f"nearest: {found}"
                    if found
                    else f"nothing like it among the {len(names())} of `nereus list models`"
                )
                + "; or give a directory with its config.json"
            )
        key = key.removesuffix(ending)
    return models[key]


def names() -> tuple[str, ...]:
    """The full names of all models of the list, by family."""
    return tuple(dict.fromkeys(model.name for model in _models().values()))


def _key(name: str) -> str:
    last = name.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"^(?:meta-)?llama-?(?=\d)", "llama-", last)


@cache
def _models() -> Mapping[str, Known]:
    """Every model of the file by each of its names."""
    listed = yaml.safe_load(files(__name__).joinpath("models.yaml").read_text(encoding="utf-8"))
    found: dict[str, Known] = {}
    for family, table in listed.items():
        for name, row in table["models"].items():
            model = _model(family, table, name, row)
            found[_key(name)] = model
            for other, positions in row.get("also", {}).items():
                found[_key(other)] = replace(model, spec=replace(model.spec, max_positions=positions))
    return found


def _model(family: str, table: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> Known:
    sizes = dict(zip(table["columns"], row["sizes"], strict=True))
    own = {key: value for key, value in row.items() if key not in ("sizes", "positions", "also", "without")}
    spec = ModelSpec(family=family, max_positions=row["positions"], **{**table.get("fixed", {}), **sizes, **own})
    return Known(name, spec, row.get("without", ""))
