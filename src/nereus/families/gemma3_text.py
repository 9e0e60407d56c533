"""Gemma 3, text part: norms on both sides of each block, tied embeddings, a window in five layers of six."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from nereus.core import ModelSpec, TensorSpec
from nereus.families import _config, _tensors

KEYS = MappingProxyType({"window": "sliding_window"})
"""Fields of the spec and their keys in `config.json`, beside those that every family has."""


@dataclass(frozen=True)
class Gemma3Text:
    """Gemma 3, 1B to 27B, without its vision tower."""

    trainable: ClassVar[bool] = False

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes from a Hugging Face `config.json`. Raises SettingsError for what is not supported."""
        _config.require(config, "gemma3_text", "hidden_activation", "gelu_pytorch_tanh")
        every = _config.number(config, "gemma3_text", "sliding_window_pattern", 6)
        own = {"qk_norm": True, "post_norms": True, "full_every": every}
        return _config.read_spec(
            {"tie_word_embeddings": True, **config}, "gemma3_text", head_dim=256, keys=KEYS, trainable=False, **own
        )

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The `config.json` of a spec."""
        config = _config.write_config(spec, "gemma3_text", "Gemma3", KEYS)
        del config["hidden_act"]
        own = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window_pattern": spec.full_every}
        return config | own

    def tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Every tensor with its global shape and cut."""
        return _tensors.tensors(spec)

    def legal_tp(self, spec: ModelSpec) -> tuple[int, ...]:
        """TP degrees that cut the heads evenly, ascending."""
        return _tensors.legal_tp(spec)
