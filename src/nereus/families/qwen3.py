"""Qwen3 dense: Llama with a norm on each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nereus.core import ModelSpec, TensorSpec
from nereus.families import _config, _tensors


@dataclass(frozen=True)
class Qwen3:
    """Qwen3, dense."""

    trainable: ClassVar[bool] = True

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes from a Hugging Face `config.json`. Raises SettingsError for what is not supported."""
        return _config.read_spec(config, "qwen3", head_dim=128, qk_norm=True)

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The `config.json` of a spec."""
        return _config.write_config(spec, "qwen3", "Qwen3")

    def tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Every tensor with its global shape and cut."""
        return _tensors.tensors(spec)

    def legal_tp(self, spec: ModelSpec) -> tuple[int, ...]:
        """TP degrees that cut the heads evenly, ascending."""
        return _tensors.legal_tp(spec)
