"""Closed-form parameter counts: published sizes, parts computed by hand, and the tensors of the families."""

from __future__ import annotations

import pytest

from nereus.core import Head, ModelSpec
from nereus.cost.parameters import parameters

LLAMA_8B = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = ModelSpec("llama", 80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_405B = ModelSpec("llama", 126, 16384, 128, 8, 128, 53248, 128256)
QWEN3_32B = ModelSpec("qwen3", 64, 5120, 64, 8, 128, 25600, 151936, qk_norm=True)
QWEN3_30B_A3B = ModelSpec(
    "qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, 128, 8, qk_norm=True, expert_hidden=768
)  # fmt: skip
MIXTRAL = ModelSpec("mixtral", 32, 4096, 32, 8, 128, 14336, 32000, 8, 2, expert_hidden=14336)
DEEPSEEK_V3 = ModelSpec(
    "deepseek_v3", 61, 7168, 128, 128, 128, 18432, 129280, 256, 8,
    expert_hidden=2048, shared_experts=1, dense_layers=3, query_rank=1536, kv_rank=512, rope_head_dim=64,
    value_head_dim=128,
)  # fmt: skip
GPT2 = ModelSpec(
    "gpt2", 12, 768, 12, 12, 64, 3072, 50257,
    tied_embeddings=True, gated=False, biases=True, learned_positions=True, max_positions=1024,
)  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "published", "active"),
    [
        (LLAMA_8B, 8.030e9, 8.030e9),
        (LLAMA_70B, 70.554e9, 70.554e9),
        (LLAMA_405B, 405.85e9, 405.85e9),
        (QWEN3_32B, 32.762e9, 32.762e9),
        (QWEN3_30B_A3B, 30.532e9, 3.353e9),
        (MIXTRAL, 46.703e9, 12.880e9),
        (DEEPSEEK_V3, 671.03e9, 37.55e9),
        (GPT2, 124.44e6, 124.44e6),
    ],
    ids=lambda value: value.family if isinstance(value, ModelSpec) else None,
)
def test_published_sizes(spec: ModelSpec, published: float, active: float) -> None:
    parts = parameters(spec)
    assert parts.total == pytest.approx(published, rel=1e-3)
    assert parts.active == pytest.approx(active, rel=1e-3)


def test_a_layer_of_deepseek_v3_by_hand() -> None:
    parts = parameters(DEEPSEEK_V3)
    query = 7168 * 1536 + 1536 + 1536 * 128 * 192
    keys = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    assert parts.attention == query + keys + 128 * 128 * 7168
    assert parts.ffn == 3 * 7168 * 18432
    assert parts.router == 256 * 7168
    assert parts.shared == parts.expert == 3 * 7168 * 2048
    assert (parts.dense_layers, parts.expert_layers) == (3, 58)


def test_the_fullest_rank_holds_replicated_heads_padded_rows_and_larger_shares() -> None:
    parts = parameters(QWEN3_30B_A3B, tp=[1, 8, 3], ep=[1, 1, 2])
    norms = 2 * 128
    assert parts.attention[1] == 2048 * 128 * (4 + 1 + 1 + 4) + norms  # 4 query heads, one of 4 KV heads held twice
    assert list(parts.expert) == [3 * 2048 * 768, 3 * 2048 * 96, 3 * 2048 * 768]
    assert list(parts.experts) == [128, 128, 64]
    assert parts.head[2] == 2048 * 50646  # ceil(151936 / 3)


def test_a_scalar_head_and_tied_embeddings() -> None:
    critic = ModelSpec("llama", 2, 32, 4, 2, 8, 64, 96, head=Head.SCALAR)
    tied = ModelSpec("llama", 2, 32, 4, 2, 8, 64, 96, tied_embeddings=True)
    assert parameters(critic).head == 32
    assert parameters(tied).head == 0
    assert parameters(critic).total - parameters(tied).total == 32
