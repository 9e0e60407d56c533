"""Families that are planned but not trained here: sizes, cuts and counts against transformers' own models."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from nereus.core import Head, ModelSpec, SettingsError, plugins
from nereus.core.ports import Family
from nereus.cost.parameters import parameters

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 18,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 5,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | {"q_lora_rank": None},
    "deepseek_v3": LATENT,
    "gemma3_text": {"sliding_window": 8},
    "glm4_moe": {key: LATENT[key] for key in list(LATENT)[1:6]} | {"attention_bias": True, "use_qk_norm": True},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 8, "n_positions": 16},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8},
    "kimi_k2": LATENT,
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}
STANDS_FOR = {"kimi_k2": "deepseek_v3"}
"""The model type under which transformers knows an architecture."""


def family(name: str) -> Family:
    found: Family = plugins.make("nereus.families", name, {})
    return found


def spec_of(name: str, **changes: Any) -> ModelSpec:
    return family(name).spec(SIZES | OWN[name] | changes)


def test_every_family_is_trainable_or_listed_here() -> None:
    planned = {name for name in plugins.names("nereus.families") if not family(name).trainable}
    assert planned == set(OWN)


@pytest.mark.parametrize("name", OWN)
def test_as_many_parameters_as_the_model_of_transformers(name: str) -> None:
    sizes = {} if name == "gpt2" else {"hidden_act": "silu"}
    config = AutoConfig.for_model(STANDS_FOR.get(name, name), **(SIZES | sizes | OWN[name]))
    counted = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    spec = family(name).spec(config.to_dict())
    assert sum(tensor.elements for tensor in family(name).tensors(spec)) == counted
    assert parameters(spec).total == counted


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("head", list(Head))
def test_the_config_of_a_spec_reads_back(name: str, head: Head) -> None:
    own = spec_of(name)
    spec = replace(
        own,
        head=head,
        tied_embeddings=own.tied_embeddings and head is Head.LM,
        dtype="bf16",
        norm_eps=1e-5,
        max_positions=256,
    )
    assert family(name).spec(family(name).config(spec)) == spec


@st.composite
def _cases(draw: st.DrawFn) -> tuple[ModelSpec, int, int]:
    name = draw(st.sampled_from(sorted(OWN)))
    heads, width, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 40))
    spec = replace(
        spec_of(name), kv_heads=heads, heads=2 * heads, ffn_hidden=width, vocab=vocab, layers=draw(st.integers(1, 4))
    )
    if spec.experts:
        spec = replace(spec, experts=draw(st.integers(2, 9)), expert_hidden=draw(st.integers(1, 9)))
    return spec, draw(st.integers(1, 8)), draw(st.integers(1, spec.experts or 1))


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_the_closed_form_is_the_sum_over_the_tensors_of_the_fullest_rank(case: tuple[ModelSpec, int, int]) -> None:
    spec, tp, ep = case
    tensors = family(spec.family).tensors(spec)
    stored = [sum(math.prod(tensor.local_shape(tp, rank, ep)) for tensor in tensors) for rank in range(tp)]
    assert parameters(spec, tp, ep).total == stored[0] == max(stored)
    expected = sum(t.elements for t in tensors if t.experts) * (spec.experts - spec.experts_per_token)
    active = sum(t.elements for t in tensors) - expected // max(spec.experts, 1)
    assert parameters(spec).active == active


@pytest.mark.parametrize("name", [name for name in OWN if name != "gemma3_text" and name != "gpt2"])
def test_a_missing_number_of_experts_is_named(name: str) -> None:
    key = next(key for key in OWN[name] if key in ("num_experts", "num_local_experts", "n_routed_experts"))
    with pytest.raises(SettingsError, match=f"{name} config.json: '{key}' is missing"):
        spec_of(name, **{key: None})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096, supported: None"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], supported: None or \[\]"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias is True"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2, supported: 1"),
        ("deepseek_v3", {"q_lora_rank": "wide"}, "q_lora_rank is 'wide', expected a number"),
        ("gpt2", {"n_head": 5}, "n_embd 32 is not a multiple of n_head 5"),
        ("gpt2", {"activation_function": "swish"}, "activation_function is 'swish', supported: 'gelu_new'"),
    ],
)
def test_what_is_not_supported_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        spec_of(name, **changes)


def test_rotations_and_quantized_files_do_not_matter_to_a_plan() -> None:
    plain = spec_of("deepseek_v3")
    assert spec_of("deepseek_v3", rope_scaling={"type": "yarn", "factor": 40}, quantization_config={"bits": 8}) == plain


def test_listing_the_tensors_of_deepseek_v3_stays_small() -> None:
    spec = replace(spec_of("deepseek_v3"), layers=61, dense_layers=3, experts=256)
    assert len(family("deepseek_v3").tensors(spec)) < 61 * 20
