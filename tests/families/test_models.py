"""Models by name: published sizes, the family's own reading of them, and names as people write them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.core import Head, SettingsError, plugins
from nereus.cost.parameters import parameters
from nereus.families.models import known, named, names

PUBLISHED = {
    "Llama-2-13b-hf": 13.016e9,
    "Llama-3.1-8B": 8.030e9,
    "Llama-3.3-70B-Instruct": 70.554e9,
    "Llama-3.1-405B": 405.85e9,
    "Llama-3.2-1B": 1.236e9,
    "Llama-3.2-3B": 3.213e9,
    "SmolLM2-135M": 134.5e6,
    "TinyLlama-1.1B": 1.100e9,
    "Mistral-7B-v0.3": 7.248e9,
    "Mistral-Nemo-12B": 12.248e9,
    "Qwen2.5-0.5B": 0.494e9,
    "Qwen2.5-1.5B": 1.544e9,
    "Qwen2.5-7B": 7.616e9,
    "Qwen2.5-14B": 14.770e9,
    "Qwen2.5-72B": 72.706e9,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1.777e9,
    "Qwen3-0.6B": 0.596e9,
    "Qwen3-4B": 4.022e9,
    "Qwen3-32B": 32.762e9,
    "Qwen3-30B-A3B": 30.532e9,
    "Qwen3-235B-A22B": 235.09e9,
    "Qwen3-Coder-480B-A35B-Instruct": 480.15e9,
    "Mixtral-8x7B": 46.703e9,
    "Mixtral-8x22B": 140.62e9,
    "DeepSeek-V2-Lite": 15.706e9,
    "DeepSeek-V2": 235.74e9,
    "DeepSeek-V3": 671.03e9,
    "Moonlight-16B-A3B": 15.960e9,
    "Kimi-K2": 1026.4e9,
    "gpt-oss-120b": 116.83e9,
    "gemma-3-1b-it": 1.000e9,
    "gpt2-xl": 1.558e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    assert parameters(named(name)).total == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.parametrize("name", names())
def test_the_family_reads_the_same_sizes_from_its_own_config(name: str) -> None:
    spec = named(name)
    family = plugins.make("nereus.families", spec.family, {})
    read = family.spec(family.config(spec))
    assert read == spec


@pytest.mark.parametrize(
    ("written", "full"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("llama3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("/models/checkpoints/Qwen3-8B/", "Qwen/Qwen3-8B"),
        ("qwen/qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B"),
        ("Qwen3-30B-A3B-Instruct-2507-FP8", "Qwen/Qwen3-30B-A3B"),
        ("deepseek-ai/deepseek-llm-7b-chat", "deepseek-ai/deepseek-llm-7b"),
        ("deepseek-r1", "deepseek-ai/DeepSeek-V3"),
        ("DeepSeek-R1-Distill-Llama-70B", "meta-llama/Llama-3.1-70B"),
    ],
)
def test_names_as_people_write_them(written: str, full: str) -> None:
    assert known(written).name == full


def test_copies_of_the_same_sizes_have_their_own_longest_sequence() -> None:
    assert named("Qwen2.5-7B").max_positions == 131072
    assert named("Qwen2.5-7B-Instruct").max_positions == 32768
    assert named("Qwen2.5-Math-7B-Instruct").max_positions == 4096
    assert named("Qwen3-4B-Instruct-2507").max_positions == 262144


def test_precision_and_head_are_the_callers() -> None:
    critic = named("Qwen2.5-0.5B", dtype="fp32", head=Head.SCALAR)
    assert (critic.dtype, critic.head, critic.tied_embeddings) == ("fp32", Head.SCALAR, False)
    assert named("Qwen2.5-0.5B").dtype == "bf16"


def test_what_a_size_leaves_out_is_said() -> None:
    assert known("Qwen2.5-VL-7B-Instruct").without == "vision tower"
    assert known("Qwen3-8B").without == ""


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"'Qwen3-80B' is unknown; nearest: Qwen/Qwen3-8B.*config\.json"):
        named("Qwen3-80B")
    with pytest.raises(
        SettingsError, match=rf"'zzzz' is unknown; nothing like it among the {len(names())} of .nereus list models."
    ):
        named("zzzz")
    with pytest.raises(SettingsError, match="nearest: Qwen/Qwen3-8B"):
        named("someone/my-Qwen3-8B-sft")


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("Qwen2.5-7B", [1, 2, 4]),  # 28 heads, 4 KV heads: no TP of 8
        ("llama-1-13b", [1, 2, 4, 5, 8]),  # 40 heads: no TP of 3 on a node of three
        ("llama-33b", [1, 2, 4]),  # 52 heads
        ("Qwen3-30B-A3B", [1, 2, 4, 8]),  # 4 KV heads at TP 8: each held twice
        ("SmolLM2-135M", [1, 3]),  # 9 heads, 3 KV heads
        ("DeepSeek-V3", [1, 2, 4, 8]),
    ],
)
def test_legal_tp_up_to_a_node_of_eight(name: str, valid: list[int]) -> None:
    spec = named(name)
    assert [tp for tp in plugins.make("nereus.families", spec.family, {}).legal_tp(spec) if tp <= 8] == valid


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(32_001, 2, 16_001), (151_936, 3, 50_646), (129_280, 24, 5_387)])
def test_a_vocabulary_that_tp_does_not_divide_is_padded(vocab: int, tp: int, rows: int) -> None:
    spec = replace(named("Llama-3.1-8B"), vocab=vocab)
    head = plugins.make("nereus.families", "llama", {}).tensors(spec)[-1]
    assert head.local_shape(tp, tp - 1) == (rows, spec.hidden)
    intervals = [head.interval(tp, rank) for rank in range(tp)]
    assert [stop for _, stop in intervals[:-1]] == [start for start, _ in intervals[1:]]
    assert (intervals[0][0], intervals[-1][1]) == (0, vocab)
    assert parameters(spec, tp).head == rows * spec.hidden
