"""GLM-4.5: grouped attention with biases, a few dense layers, then routed experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nereus.core import ModelSpec, TensorSpec
from nereus.families import _config, _tensors


@dataclass(frozen=True)
class Glm4Moe:
    """GLM-4.5, 4.6 and 4.7, without the layers that predict further tokens."""

    trainable: ClassVar[bool] = False

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes from a Hugging Face `config.json`. Raises SettingsError for what is not supported."""
        own = {"qkv_bias": bool(config.get("attention_bias")), "qk_norm": bool(config.get("use_qk_norm"))}
        return _config.read_spec(
            config, "glm4_moe", head_dim=128, keys=_config.ROUTED, trainable=False, switches=("attention_bias",), **own
        )

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The `config.json` of a spec."""
        own = {"attention_bias": spec.qkv_bias, "use_qk_norm": spec.qk_norm}
        return _config.write_config(spec, "glm4_moe", "Glm4Moe", _config.ROUTED) | own

    def tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Every tensor with its global shape and cut."""
        return _tensors.tensors(spec)

    def legal_tp(self, spec: ModelSpec) -> tuple[int, ...]:
        """TP degrees that cut the heads evenly, ascending."""
        return _tensors.legal_tp(spec)
