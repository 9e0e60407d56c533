"""Mistral: Llama as it is; sliding windows, which the first release had, are not supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nereus.core import ModelSpec, TensorSpec
from nereus.families import _config, _tensors


@dataclass(frozen=True)
class Mistral:
    """Mistral 7B from v0.2 on, Mistral Large."""

    trainable: ClassVar[bool] = True

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes from a Hugging Face `config.json`. Raises SettingsError for what is not supported."""
        _config.require(config, "mistral", "sliding_window", None)
        return _config.read_spec(config, "mistral")

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The `config.json` of a spec."""
        return _config.write_config(spec, "mistral", "Mistral")

    def tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Every tensor with its global shape and cut."""
        return _tensors.tensors(spec)

    def legal_tp(self, spec: ModelSpec) -> tuple[int, ...]:
        """TP degrees that cut the heads evenly, ascending."""
        return _tensors.legal_tp(spec)
