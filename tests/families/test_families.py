"""Sizes, cuts and legal degrees of the trainable families against transformers' own configurations and models."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from nereus.core import Head, ModelSpec, RopeScaling, SettingsError, Where, plugins
from nereus.core.ports import Family
from nereus.families import EMBED, LM_HEAD, SCORE

FAMILIES = tuple(name for name in plugins.names("nereus.families") if plugins.load("nereus.families", name).trainable)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 17,
}


def family(name: str) -> Family:
    found: Family = plugins.make("nereus.families", name, {})
    return found


def spec_of(name: str, **changes: Any) -> ModelSpec:
    return family(name).spec({**SIZES, **changes})


def test_the_families() -> None:
    assert FAMILIES == ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_transformers(name: str, tied: bool) -> None:
    config = AutoConfig.for_model(name, **SIZES, tie_word_embeddings=tied, head_dim=4, sliding_window=None)
    model = AutoModelForCausalLM.from_config(config)
    spec = family(name).spec(config.to_dict())
    expected = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in family(name).tensors(spec)} == expected
    assert spec.tied_embeddings is tied


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 64)])
@pytest.mark.parametrize("head", list(Head))
def test_the_config_of_a_spec_reads_back(name: str, scaling: RopeScaling | None, head: Head) -> None:
    spec = replace(
        spec_of(name), rope_scaling=scaling, head=head, rope_theta=5e5, dtype="bf16", norm_eps=1e-5, max_positions=256
    )
    config = family(name).config(spec)
    assert family(name).spec(config) == spec
    loaded = AutoConfig.for_model(**config)
    assert loaded.rope_parameters["rope_theta"] == 5e5
    assert loaded.rope_parameters["rope_type"] == ("llama3" if scaling else "default")
    assert loaded.head_dim == spec.head_dim


def test_rope_is_read_as_old_and_new_transformers_write_it() -> None:
    old = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    expected = RopeScaling(8.0, 1.0, 4.0, 8192)
    for config in (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **old}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **old}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **old}},
    ):
        spec = spec_of("llama", **config)
        assert (spec.rope_theta, spec.rope_scaling) == (5e5, expected)
    assert spec_of("llama", rope_theta=123.0, rope_scaling=None).rope_theta == 123.0


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (9, 3), (12, 4), (8, 8), (6, 1)])
def test_legal_tp_cuts_heads_evenly_and_matches_query_heads_to_their_kv_head(
    name: str, heads: int, kv_heads: int
) -> None:
    spec = spec_of(name, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * 4)
    degrees = family(name).legal_tp(spec)
    assert degrees[0] == 1
    assert heads in degrees
    tensors = {tensor.name.removeprefix("model.layers.0.self_attn."): tensor for tensor in family(name).tensors(spec)}
    for tp in range(1, heads + 1):
        fits = True
        for rank in range(tp):
            q_start, q_stop = tensors["q_proj.weight"].cut.share(tp, rank)
            k_start, k_stop = tensors["k_proj.weight"].cut.share(tp, rank)
            count, group = q_stop - q_start, heads // kv_heads
            needed = sorted({query // group for query in range(q_start, q_stop)})
            even = count * tp == heads and count % (k_stop - k_start or 1) == 0
            fits &= even and needed == list(range(k_start, k_stop))
        assert (tp in degrees) == fits, f"tp {tp}"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_cut_covers_each_element_once_but_for_replicas(name: str) -> None:
    spec = spec_of(name)
    for tensor in family(name).tensors(spec):
        for tp in (*family(name).legal_tp(spec), 3, 5):
            intervals = [tensor.interval(tp, rank) for rank in range(tp)]
            distinct = sorted(set(interval for interval in intervals if interval[0] < interval[1]))
            assert distinct[0][0] == 0
            assert distinct[-1][1] == tensor.shape[tensor.cut.dim or 0]
            assert all(left[1] == right[0] for left, right in pairwise(distinct))
            replicated = tensor.cut.dim is None or (tensor.cut.replicated and tensor.cut.blocks < tp)
            assert replicated or len(distinct) == len([i for i in intervals if i[0] < i[1]])


def test_biases_are_cut_with_their_weights_and_head_norms_collect_gradients() -> None:
    tensors = {tensor.name: tensor for tensor in family("qwen2").tensors(spec_of("qwen2"))}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight, bias = (tensors[f"model.layers.1.self_attn.{name}.{kind}"] for kind in ("weight", "bias"))
        assert weight.cut == bias.cut
    partial = [tensor.name for tensor in family("qwen3").tensors(spec_of("qwen3")) if tensor.partial_gradient]
    assert partial == [f"model.layers.{i}.self_attn.{n}_norm.weight" for i in (0, 1) for n in ("q", "k")]


def test_ends_of_the_pipeline() -> None:
    def places(spec: ModelSpec) -> dict[str, Where]:
        return {t.name: t.where for t in family("llama").tensors(spec) if t.where is not Where.LAYER}

    norm = {"model.norm.weight": Where.LAST}
    untied = spec_of("llama")
    assert places(untied) == {EMBED: Where.FIRST, **norm, LM_HEAD: Where.LAST}
    assert places(spec_of("llama", tie_word_embeddings=True)) == {EMBED: Where.BOTH_ENDS, **norm}
    assert places(replace(untied, head=Head.SCALAR)) == {EMBED: Where.FIRST, **norm, SCORE: Where.LAST}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True, only false"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported, valid: 'default'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn', valid: float64"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        spec_of("llama", **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_hidden_layers": 1.5}, r"num_hidden_layers is 1\.5"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"num_key_value_heads": [2]}, r"num_key_value_heads is \[2\]"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"hidden_size": 10**30}, r"hidden_size is 10+, at most 16,777,216"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x'"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'"),
    ],
)
def test_a_value_that_is_no_number_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=f"llama config.json: {message}"):
        spec_of("llama", **change)


def test_architectures_are_names() -> None:
    with pytest.raises(SettingsError, match="architectures is 7"):
        spec_of("llama", architectures=7)


def test_a_missing_size_is_named() -> None:
    config = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    with pytest.raises(SettingsError, match="'intermediate_size' is missing"):
        family("llama").spec(config)
