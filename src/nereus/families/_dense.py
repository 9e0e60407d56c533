"""What the dense Llama-like families share: reading and writing `config.json`, and how each tensor is cut."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from nereus.core import Cut, Head, ModelSpec, RopeScaling, SettingsError, TensorSpec, Where
from nereus.families import EMBED, LM_HEAD, NORM, SCORE

WHOLE = Cut()

_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_spec(
    config: Mapping[str, Any], family: str, *, head_dim: int | None, qkv_bias: bool, qk_norm: bool
) -> ModelSpec:
    """Sizes from a `config.json`; `head_dim` is the family's value when the file has none (None: hidden / heads)."""
    _refuse_unsupported(config, family)
    number = partial(_number, config, family)
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    theta, scaling = _rope(config, family)
    head = _head(config)
    return ModelSpec(
        family=family,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads) or heads,
        head_dim=number("head_dim", 0) or head_dim or hidden // max(heads, 1),
        ffn_hidden=number("intermediate_size"),
        vocab=number("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)) and head is Head.LM,
        dtype=_dtype(config, family),
        head=head,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        norm_eps=float(number("rms_norm_eps", 1e-6, kind=float)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=number("max_position_embeddings", 131_072),
    )


def _number(config: Mapping[str, Any], family: str, key: str, default: Any = None, kind: type = int) -> Any:
    """A number of the file, `default` where it has none. Raises SettingsError for anything else."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise SettingsError(f"{family} config.json: {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise SettingsError(f"{family} config.json: {key} is {value!r}, expected a number")
    return value


def write_config(spec: ModelSpec, model_type: str, class_prefix: str) -> dict[str, Any]:
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
        "dtype": next(name for name, short in _DTYPES.items() if short == spec.dtype),
    }
    if spec.rope_scaling is not None:
        config["rope_scaling"] = rope
    if spec.head is Head.SCALAR:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


def tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Every tensor of a dense decoder in model order."""
    vocabulary = Cut(0, spec.vocab, padded=True)
    table = (spec.vocab, spec.hidden)
    found = [TensorSpec(EMBED, table, Where.BOTH_ENDS if spec.tied_embeddings else Where.FIRST, cut=vocabulary)]
    for layer in range(spec.layers):
        found += _layer(spec, layer)
    found.append(TensorSpec(NORM, (spec.hidden,), Where.LAST))
    if spec.head is Head.SCALAR:
        found.append(TensorSpec(SCORE, (1, spec.hidden), Where.LAST))
    elif not spec.tied_embeddings:
        found.append(TensorSpec(LM_HEAD, table, Where.LAST, cut=vocabulary))
    return tuple(found)


def legal_tp(spec: ModelSpec) -> tuple[int, ...]:
    """Degrees that give every rank as many query heads, with whole KV heads kept or replicated evenly."""
    return tuple(
        tp
        for tp in range(1, spec.heads + 1)
        if spec.heads % tp == 0 and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0) and tp <= spec.ffn_hidden
    )


def _layer(spec: ModelSpec, layer: int) -> list[TensorSpec]:
    prefix = f"model.layers.{layer}."
    query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    heads, kv_heads = Cut(0, spec.heads), Cut(0, spec.kv_heads, replicated=True)
    rows, columns = Cut(0, spec.ffn_hidden), Cut(1, spec.ffn_hidden)

    def tensor(name: str, shape: tuple[int, ...], cut: Cut = WHOLE, partial_gradient: bool = False) -> TensorSpec:
        return TensorSpec(prefix + name, shape, Where.LAYER, layer, cut, partial_gradient)

    found = [tensor("input_layernorm.weight", (spec.hidden,))]
    for name, size, cut in (("q_proj", query, heads), ("k_proj", keys, kv_heads), ("v_proj", keys, kv_heads)):
        found.append(tensor(f"self_attn.{name}.weight", (size, spec.hidden), cut))
        if spec.qkv_bias:
            found.append(tensor(f"self_attn.{name}.bias", (size,), cut))
    if spec.qk_norm:
        found += [
            tensor(f"self_attn.{name}.weight", (spec.head_dim,), partial_gradient=True) for name in ("q_norm", "k_norm")
        ]
    found += [
        tensor("self_attn.o_proj.weight", (spec.hidden, query), Cut(1, spec.heads)),
        tensor("post_attention_layernorm.weight", (spec.hidden,)),
        tensor("mlp.gate_proj.weight", (spec.ffn_hidden, spec.hidden), rows),
        tensor("mlp.up_proj.weight", (spec.ffn_hidden, spec.hidden), rows),
        tensor("mlp.down_proj.weight", (spec.hidden, spec.ffn_hidden), columns),
    ]
    return found


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise SettingsError(f"{family} config.json: hidden_act {activation!r} is not supported, valid: 'silu'")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            raise SettingsError(f"{family} config.json: {key} is {config[key]!r}, only false is supported")
    if config.get("quantization_config"):
        raise SettingsError(f"{family} config.json: quantized weights (quantization_config) are not supported")


def _head(config: Mapping[str, Any]) -> Head:
    names = config.get("architectures") or ()
    scalar = any(name.endswith(("ForSequenceClassification", "ForTokenClassification")) for name in names)
    return Head.SCALAR if scalar else Head.LM


def _dtype(config: Mapping[str, Any], family: str) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise SettingsError(f"{family} config.json: dtype {name!r}, valid: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _rope(config: Mapping[str, Any], family: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling; transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise SettingsError(f"{family} config.json: rope_parameters is {rope!r}, expected an object")
    number = partial(_number, rope, family, kind=float)
    theta = float(number("rope_theta", 0) or _number(config, family, "rope_theta", 10_000.0, float))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise SettingsError(f"{family} config.json: rope_type {kind!r} is not supported, valid: 'default', 'llama3'")
    missing = [key for key in _LLAMA3_KEYS if key not in rope]
    if missing:
        raise SettingsError(f"{family} config.json: llama3 rope scaling lacks {', '.join(missing)}")
    factor, low, high, original = (number(key) for key in _LLAMA3_KEYS)
    return theta, RopeScaling(float(factor), float(low), float(high), int(original))
