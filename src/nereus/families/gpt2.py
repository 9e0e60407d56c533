"""GPT-2 and the GPTs of Megatron: LayerNorm, biases, learned positions, no gate; fused projections are cut in three."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nereus.core import Head, ModelSpec, SettingsError, TensorSpec
from nereus.families import _config, _tensors

ACTIVATIONS = ("gelu_new", "gelu", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True)
class Gpt2:
    """GPT-2, GPT-3 sizes, Megatron's GPT."""

    trainable: ClassVar[bool] = False

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes from a Hugging Face `config.json`. Raises SettingsError for what is not supported."""
        _config.require(config, "gpt2", "activation_function", *ACTIVATIONS)
        hidden, layers, heads, vocab, positions = (
            _config.number(config, "gpt2", key) for key in ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")
        )
        if heads < 1 or hidden % heads:
            raise SettingsError(f"gpt2 config.json: n_embd {hidden} is not a multiple of n_head {heads}")
        head = _config.head(config)
        return ModelSpec(
            family="gpt2",
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            ffn_hidden=_config.number(config, "gpt2", "n_inner", 4 * hidden),
            vocab=vocab,
            tied_embeddings=bool(config.get("tie_word_embeddings", True)) and head is Head.LM,
            dtype=_config.dtype(config, "gpt2"),
            head=head,
            norm_eps=float(_config.number(config, "gpt2", "layer_norm_epsilon", 1e-5, float)),
            max_positions=positions,
            gated=False,
            biases=True,
            layer_norm=True,
            learned_positions=True,
        )

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The `config.json` of a spec."""
        return {
            "architectures": ["GPT2LMHeadModel" if spec.head is Head.LM else "GPT2ForSequenceClassification"],
            "model_type": "gpt2",
            "n_embd": spec.hidden,
            "n_layer": spec.layers,
            "n_head": spec.heads,
            "n_inner": spec.ffn_hidden,
            "n_positions": spec.max_positions,
            "vocab_size": spec.vocab,
            "activation_function": ACTIVATIONS[0],
            "layer_norm_epsilon": spec.norm_eps,
            "tie_word_embeddings": spec.tied_embeddings,
            "dtype": _config.dtype_name(spec),
        }

    def tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Every tensor with its global shape and cut."""
        return _tensors.tensors(spec)

    def legal_tp(self, spec: ModelSpec) -> tuple[int, ...]:
        """TP degrees that cut the heads evenly, ascending."""
        return _tensors.legal_tp(spec)
