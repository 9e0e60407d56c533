"""From a Hugging Face `config.json` to the sizes of a Llama-like model, and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from nereus.core import Head, ModelSpec, RopeScaling, SettingsError

_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

LARGEST = 1 << 24
"""No size of a config is larger: products of sizes stay integers of 64 bits, and degrees can be counted through."""
ROUTED: Mapping[str, str] = MappingProxyType(
    {
        "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_hidden": "moe_intermediate_size",
        "shared_experts": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
    }
)
"""Keys of routed experts beside shared ones, behind a few dense layers: DeepSeek's, which others took over."""


def read_spec(
    config: Mapping[str, Any],
    family: str,
    *,
    head_dim: int | None = None,
    keys: Mapping[str, str] = MappingProxyType({}),
    trainable: bool = True,
    switches: tuple[str, ...] = (),
    **fixed: Any,
) -> ModelSpec:
    """Sizes from a `config.json`; `head_dim` is the family's value when the file has none (None: hidden / heads).

    `keys` names the file's key of each further field, `fixed` are fields that the architecture itself decides,
    `switches` the yes-or-no keys it reads itself. Of a family that is not `trainable` only sizes matter: how positions
    rotate and how files are quantized do not.
    """
    _refuse_unsupported(config, family, trainable, switches)
    size = partial(number, config, family)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    theta, scaling = _rope(config, family, trainable)
    own_head = head(config)
    sizes = {
        "family": family,
        "layers": size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": size("num_key_value_heads", heads) or heads,
        "head_dim": size("head_dim", 0) or head_dim or hidden // max(heads, 1),
        "ffn_hidden": size("intermediate_size"),
        "vocab": size("vocab_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)) and own_head is Head.LM,
        "dtype": dtype(config, family),
        "head": own_head,
        "norm_eps": float(size("rms_norm_eps", 1e-6, kind=float)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": size("max_position_embeddings", 131_072),
    }
    own = {field: size(key) for field, key in keys.items()}
    return ModelSpec(**{**sizes, **own, **fixed})


def require(config: Mapping[str, Any], family: str, key: str, *valid: Any) -> None:
    """Raises SettingsError when the file gives `key` a value that the family does not know."""
    if key in config and config[key] not in valid:
        names = " or ".join(repr(value) for value in valid)
        raise SettingsError(f"{family} config.json: {key} is {config[key]!r}, supported: {names}")


def number(config: Mapping[str, Any], family: str, key: str, default: Any = None, kind: type = int) -> Any:
    """A number of the file, `default` where it has none. Raises SettingsError for anything else."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise SettingsError(f"{family} config.json: {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int | kind) or value != value:  # the last is NaN
        raise SettingsError(f"{family} config.json: {key} is {value!r}, expected a number")
    if kind is int and isinstance(value, int) and value > LARGEST:
        raise SettingsError(f"{family} config.json: {key} is {value!r}, at most {LARGEST:,} is valid")
    return value


def write_config(
    spec: ModelSpec, model_type: str, class_prefix: str, keys: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The `config.json` of a spec, readable by transformers 4 (`rope_theta`) and 5 (`rope_parameters`)."""
    task = "ForCausalLM" if spec.head is Head.LM else "ForSequenceClassification"
    rope: dict[str, Any] = {"rope_type": "default"}
    if spec.rope_scaling is not None:
        scaling = spec.rope_scaling
        values = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_positions)
        rope = {"rope_type": "llama3", **dict(zip(_LLAMA3_KEYS, values, strict=True))}
    config: dict[str, Any] = {
        "architectures": [class_prefix + task],
        "model_type": model_type,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {**rope, "rope_theta": spec.rope_theta},
        "dtype": dtype_name(spec),
        **{key: getattr(spec, field) for field, key in keys.items()},
    }
    if spec.rope_scaling is not None:
        config["rope_scaling"] = rope
    if spec.head is Head.SCALAR:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


def _refuse_unsupported(config: Mapping[str, Any], family: str, trainable: bool, switches: tuple[str, ...]) -> None:
    require(config, family, "hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if key not in switches and config.get(key):
            raise SettingsError(f"{family} config.json: {key} is {config[key]!r}, only false is supported")
    if trainable and config.get("quantization_config"):
        raise SettingsError(f"{family} config.json: quantized weights (quantization_config) are not supported")


def head(config: Mapping[str, Any]) -> Head:
    names = config.get("architectures") or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SettingsError(f"config.json: architectures is {names!r}, expected a list of names")
    scalar = any(name.endswith(("ForSequenceClassification", "ForTokenClassification")) for name in names)
    return Head.SCALAR if scalar else Head.LM


def dtype(config: Mapping[str, Any], family: str) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise SettingsError(f"{family} config.json: dtype {name!r}, valid: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(spec: ModelSpec) -> str:
    """The precision of a spec as `config.json` names it. Raises SettingsError where it has no name for it."""
    names = [name for name, short in _DTYPES.items() if short == spec.dtype]
    if not names:
        raise SettingsError(f"dtype {spec.dtype} has no name in config.json, valid: {', '.join(_DTYPES.values())}")
    return names[0]


def _rope(config: Mapping[str, Any], family: str, trainable: bool) -> tuple[float, RopeScaling | None]:
    """Theta and scaling; transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise SettingsError(f"{family} config.json: rope_parameters is {rope!r}, expected an object")
    value = partial(number, rope, family, kind=float)
    theta = float(value("rope_theta", 0) or number(config, family, "rope_theta", 10_000.0, float))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" or not trainable:
        return theta, None
    if kind != "llama3":
        raise SettingsError(f"{family} config.json: rope_type {kind!r} is not supported, valid: 'default', 'llama3'")
    missing = [key for key in _LLAMA3_KEYS if key not in rope]
    if missing:
        raise SettingsError(f"{family} config.json: llama3 rope scaling lacks {', '.join(missing)}")
    factor, low, high, original = (value(key) for key in _LLAMA3_KEYS)
    return theta, RopeScaling(float(factor), float(low), float(high), int(original))
