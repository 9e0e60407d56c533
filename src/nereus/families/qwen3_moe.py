"""Qwen3 with routed experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from nereus.core import ModelSpec, TensorSpec
from nereus.families import _config, _tensors

KEYS = MappingProxyType(
    {
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_hidden": "moe_intermediate_size",
    }
)
"""Fields of the spec and their keys in `config.json`, beside those that every family has."""


@dataclass(frozen=True)
class Qwen3Moe:
    """Qwen3-30B-A3B, 235B-A22B and Qwen3-Coder."""

    trainable: ClassVar[bool] = False

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes from a Hugging Face `config.json`. Raises SettingsError for what is not supported."""
        _config.require(config, "qwen3_moe", "decoder_sparse_step", 1)
        _config.require(config, "qwen3_moe", "mlp_only_layers", None, [])
        # transformers 5 writes the number of experts under the name that Mixtral gave it.
        config = {"num_experts": config.get("num_local_experts"), **config}
        return _config.read_spec(config, "qwen3_moe", head_dim=128, keys=KEYS, trainable=False, qk_norm=True)

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The `config.json` of a spec."""
        return _config.write_config(spec, "qwen3_moe", "Qwen3Moe", KEYS)

    def tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Every tensor with its global shape and cut."""
        return _tensors.tensors(spec)

    def legal_tp(self, spec: ModelSpec) -> tuple[int, ...]:
        """TP degrees that cut the heads evenly, ascending."""
        return _tensors.legal_tp(spec)
