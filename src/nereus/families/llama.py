"""Llama: RoPE (with Llama-3 scaling), grouped KV heads, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereus.core import ModelSpec, TensorSpec
from nereus.families import _dense


@dataclass(frozen=True)
class Llama:
    """Llama 2 and 3."""

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes from a Hugging Face `config.json`. Raises SettingsError for what is not supported."""
        return _dense.read_spec(config, "llama", head_dim=None, qkv_bias=False, qk_norm=False)

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The `config.json` of a spec."""
        return _dense.write_config(spec, "llama", "Llama")

    def tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Every tensor with its global shape and cut."""
        return _dense.tensors(spec)

    def legal_tp(self, spec: ModelSpec) -> tuple[int, ...]:
        """TP degrees that cut the heads evenly, ascending."""
        return _dense.legal_tp(spec)
