"""Generation: greedy tokens of transformers, and tokens that depend on nothing but weights, prompts and ids."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from nereus.core import Layout, NereusError
from nereus.trainer.decoder.cache import BLOCK_TOKENS
from nereus.trainer.decoder.generation import generate
from nereus.trainer.decoder.model import Decoder
from nereus.trainer.decoder.parallel import Hooks, UnitGroups
from nereus.trainer.decoder.sampling import Sampling
from tests.support.ranks import run_unit
from tests.trainer.decoder import oracle

PROMPTS = [[3, 9, 4], [7], [1, 2, 3, 4, 5, 6, 7], [11, 30], [36, 0, 36, 0]]
IDS = [10, 11, 12, 13, 14]


class Case:
    def __init__(self, name: str, dtype: str = "fp32") -> None:
        self.model, family, self.spec = oracle.build(name, dtype)
        self.tensors = family.tensors(self.spec)
        self.full = oracle.full_state(self.model, self.tensors)

    def decoder(self, layout: Layout, pp_rank: int, tp_rank: int, groups: UnitGroups, **options: Any) -> Decoder:
        params = oracle.cut(self.full, self.tensors, layout, pp_rank, tp_rank, self.spec.layers)
        return Decoder(self.spec, self.tensors, layout, pp_rank, tp_rank, params, groups, **options)

    def generate(
        self, layout: Layout, sampling: Sampling, max_batch: int | None = None, step: int = 4
    ) -> list[list[int]]:
        def main(pp_rank: int, tp_rank: int, groups: UnitGroups) -> list[list[int]]:
            return generate(self.decoder(layout, pp_rank, tp_rank, groups), PROMPTS, IDS, sampling, step, max_batch)

        ranks = run_unit(layout, main)
        assert all(found == ranks[0] for found in ranks), "ranks of a unit disagree"
        return ranks[0]

    def reference(self, sampling: Sampling) -> list[list[int]]:
        """Greedy tokens by whole forward passes, one prompt at a time."""
        found = []
        for prompt in PROMPTS:
            tokens: list[int] = []
            while len(tokens) < sampling.max_response_tokens and not set(tokens[-1:]) & set(sampling.stop_tokens):
                with torch.no_grad():
                    logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
                logits[list(sampling.masked_tokens)] = -torch.inf
                tokens.append(int(logits.argmax()))
            found.append(tokens)
        return found


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", Layout(1, 1)),
        ("llama", Layout(2, 1)),
        ("llama-tied", Layout(2, 2)),
        ("llama-tied", Layout(1, 3)),
        ("llama-rope3", Layout(4, 1)),
        ("llama-thirds", Layout(3, 1)),
        ("qwen2", Layout(1, 2, (1, 2))),
        ("qwen2", Layout(4, 1)),
        ("qwen3", Layout(2, 2)),
        ("qwen3-tied", Layout(1, 1)),
    ],
)
def test_greedy_tokens_equal_the_unsharded_model(name: str, layout: Layout) -> None:
    case = Case(name)
    sampling = Sampling(8, greedy=True)
    assert case.generate(layout, sampling) == case.reference(sampling)


def test_stop_tokens_end_a_response_and_masked_tokens_never_come() -> None:
    case = Case("llama")
    free = case.reference(Sampling(12, greedy=True))
    stops = (free[0][3], free[2][8])
    sampling = Sampling(12, greedy=True, stop_tokens=stops, masked_tokens=(free[1][0], free[3][2]))
    expected = case.reference(sampling)
    lengths = {len(tokens) for tokens in expected}
    assert len(lengths) > 1, "the case must make sequences end at different steps"
    for layout in (Layout(1, 1), Layout(2, 2)):
        assert case.generate(layout, sampling) == expected


@pytest.mark.parametrize(
    "sampling", [Sampling(24, seed=5), Sampling(24, temperature=0.6, top_p=0.8, stop_tokens=(1, 2, 3))]
)
def test_sampled_tokens_depend_on_neither_layout_nor_batching(sampling: Sampling) -> None:
    case = Case("qwen3-tied", "fp64")
    expected = case.generate(Layout(1, 1), sampling)
    for layout in (Layout(2, 1), Layout(2, 2)):
        assert case.generate(layout, sampling) == expected
    assert case.generate(Layout(1, 1), sampling, max_batch=2) == expected
    assert case.generate(Layout(1, 1), sampling, max_batch=1) == expected
    assert case.generate(Layout(1, 1), sampling, step=5) != expected


def test_max_batch_bounds_the_cache_and_blocks_follow_the_lengths() -> None:
    case = Case("llama")
    shapes: list[tuple[int, ...]] = []
    hooks = Hooks(track=lambda name, tensor: shapes.append(tuple(tensor.shape)) if name == "kv_cache" else None)
    decoder = case.decoder(Layout(), 0, 0, UnitGroups(), hooks=hooks)
    generate(decoder, PROMPTS, IDS, Sampling(30, greedy=True), 0, max_batch=2)
    assert max(shape[0] for shape in shapes) == 2
    assert {shape[2] for shape in shapes} == {BLOCK_TOKENS, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS}
    assert all(shape[1:] == (case.spec.kv_heads, shape[2], case.spec.head_dim) for shape in shapes)


def test_finished_sequences_leave_the_cache() -> None:
    case = Case("llama")
    free = case.reference(Sampling(12, greedy=True))
    sizes: list[int] = []
    hooks = Hooks(track=lambda name, tensor: sizes.append(tensor.shape[0]) if name == "logits" else None)
    sampling = Sampling(12, greedy=True, stop_tokens=(free[0][3], free[2][8]))
    found = generate(case.decoder(Layout(), 0, 0, UnitGroups(), hooks=hooks), PROMPTS, IDS, sampling, 0)
    assert sizes == [sum(len(tokens) > step for tokens in found) for step in range(max(map(len, found)))]


def test_the_cache_is_made_anew_for_a_block_of_tokens_and_not_when_a_sequence_leaves() -> None:
    case, shapes = Case("llama"), []
    sampling = Sampling(40, seed=3, stop_tokens=(0, 1))
    hooks = Hooks(track=lambda name, tensor: shapes.append(tuple(tensor.shape)) if name == "kv_cache" else None)
    found = generate(case.decoder(Layout(), 0, 0, UnitGroups(), hooks=hooks), PROMPTS, IDS, sampling, 0)
    assert [len(tokens) for tokens in found] == [2, 19, 3, 14, 17]
    # Full when the longest prompt's 7 columns have become 16. By then it has left, and 3 columns are nobody's.
    made = [(shape[0], shape[2]) for shape in shapes[:: 2 * case.spec.layers]]
    assert made == [(5, BLOCK_TOKENS), (3, BLOCK_TOKENS), (3, 2 * BLOCK_TOKENS)]


def test_the_cache_is_free_when_generation_ends_without_a_garbage_collection() -> None:
    stored: list[weakref.ref[torch.Tensor]] = []
    hooks = Hooks(track=lambda name, tensor: stored.append(weakref.ref(tensor)) if name == "kv_cache" else None)
    decoder = Case("llama").decoder(Layout(), 0, 0, UnitGroups(), hooks=hooks)
    gc.disable()
    try:
        generate(decoder, PROMPTS, IDS, Sampling(5), 0)
        alive = [reference() for reference in stored]
    finally:
        gc.enable()
    assert stored
    assert not any(tensor is not None for tensor in alive)


def test_each_decode_step_is_paced() -> None:
    case, steps = Case("llama"), []
    decoder = case.decoder(Layout(), 0, 0, UnitGroups(), hooks=Hooks(pace=lambda: steps.append(1)))
    generate(decoder, PROMPTS, IDS, Sampling(7, greedy=True), 0)
    assert len(steps) == 7


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(NereusError, match="each prompt needs a token"):
        generate(Case("llama").decoder(Layout(), 0, 0, UnitGroups()), [[1], []], [0, 1], Sampling(3), 0)
