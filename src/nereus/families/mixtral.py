"""Mixtral: Mistral with routed experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from nereus.core import ModelSpec, TensorSpec
from nereus.families import _config, _tensors

KEYS = MappingProxyType(
    {
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_hidden": "intermediate_size",
    }
)
"""Fields of the spec and their keys in `config.json`, beside those that every family has."""


@dataclass(frozen=True)
class Mixtral:
    """Mixtral 8x7B and 8x22B."""

    trainable: ClassVar[bool] = False

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes from a Hugging Face `config.json`. Raises SettingsError for what is not supported."""
        _config.require(config, "mixtral", "sliding_window", None)
        return _config.read_spec(config, "mixtral", keys=KEYS, trainable=False)

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The `config.json` of a spec."""
        return _config.write_config(spec, "mixtral", "Mixtral", KEYS)

    def tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Every tensor with its global shape and cut."""
        return _tensors.tensors(spec)

    def legal_tp(self, spec: ModelSpec) -> tuple[int, ...]:
        """TP degrees that cut the heads evenly, ascending."""
        return _tensors.legal_tp(spec)
