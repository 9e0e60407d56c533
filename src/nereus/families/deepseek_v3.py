"""DeepSeek-V3: latent attention, a few dense layers, then routed experts beside shared ones (no prediction layers)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from nereus.core import ModelSpec, TensorSpec
from nereus.families import _config, _tensors

KEYS = MappingProxyType(
    {
        "head_dim": "qk_nope_head_dim",
        "rope_head_dim": "qk_rope_head_dim",
        "value_head_dim": "v_head_dim",
        "kv_rank": "kv_lora_rank",
        **_config.ROUTED,
    }
)
"""Fields of the spec and their keys in `config.json`, beside those that every family has."""


@dataclass(frozen=True)
class DeepseekV3:
    """DeepSeek-V3 and R1, without the layers that predict further tokens."""

    trainable: ClassVar[bool] = False
    model_type: ClassVar[str] = "deepseek_v3"
    class_prefix: ClassVar[str] = "DeepseekV3"

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes from a Hugging Face `config.json`. Raises SettingsError for what is not supported."""
        _config.require(config, self.model_type, "moe_layer_freq", 1)
        query_rank = _config.number(config, self.model_type, "q_lora_rank", 0)
        return _config.read_spec(config, self.model_type, keys=KEYS, trainable=False, query_rank=query_rank)

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The `config.json` of a spec."""
        config = _config.write_config(spec, self.model_type, self.class_prefix, KEYS)
        del config["head_dim"]  # of this family, the rotary part only
        return config | {"q_lora_rank": spec.query_rank or None}

    def tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Every tensor with its global shape and cut."""
        return _tensors.tensors(spec)

    def legal_tp(self, spec: ModelSpec) -> tuple[int, ...]:
        """TP degrees that cut the heads evenly, ascending."""
        return _tensors.legal_tp(spec)
