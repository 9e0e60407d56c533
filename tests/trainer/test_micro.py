"""Micro-batches: at most so many sequences, at most so many padded tokens, nothing lost and nothing reordered."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.trainer.decoder.batch import MicroBatch
from nereus.trainer.micro import micro_batches
from nereus.trainer.table import Array, padded

CPU = torch.device("cpu")
lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=12)


def arrays(pairs: list[tuple[int, int]]) -> dict[str, Array]:
    """Row r: a prompt of tokens 100 + r, a response of tokens 200 + r, one column by token and one by sample."""
    prompts, prompt_lengths = padded([[100 + row] * prompt for row, (prompt, _) in enumerate(pairs)])
    responses, response_lengths = padded([[200 + row] * response for row, (_, response) in enumerate(pairs)])
    return {
        "prompt_tokens": prompts,
        "prompt_lengths": prompt_lengths,
        "response_tokens": responses,
        "response_lengths": response_lengths,
        "advantages": responses.astype(np.float64) / 8,
        "scores": np.arange(len(pairs), dtype=np.float64),
    }


def cut(pairs: list[tuple[int, int]], sequences: int, tokens: int | None) -> list[MicroBatch]:
    return micro_batches(arrays(pairs), sequences, tokens, torch.float64, CPU)


@given(lengths, st.integers(1, 5), st.none() | st.integers(1, 40))
def test_every_micro_batch_is_within_its_bounds_and_none_could_be_larger(
    pairs: list[tuple[int, int]], sequences: int, tokens: int | None
) -> None:
    sizes = [len(batch.tokens) for batch in cut(pairs, sequences, tokens)]
    assert sum(sizes) == len(pairs)

    def allowed(rows: list[tuple[int, int]]) -> bool:
        size = len(rows) * max(prompt + response for prompt, response in rows)
        return len(rows) <= sequences and (tokens is None or size <= tokens)

    start = 0
    for size in sizes:
        assert size == 1 or allowed(pairs[start : start + size])
        following = pairs[start : start + size + 1]
        assert len(following) == size or not allowed(following)
        start += size


@given(lengths, st.integers(1, 4))
def test_rows_keep_their_order_their_tokens_and_their_columns(pairs: list[tuple[int, int]], sequences: int) -> None:
    row = 0
    for batch in cut(pairs, sequences, None):
        width = int(batch.response_lengths.max())
        assert batch.columns["advantages"].shape == (len(batch.tokens), width)
        for index, tokens in enumerate(batch.tokens.tolist()):
            prompt, response = pairs[row]
            assert tokens[: prompt + response] == [100 + row] * prompt + [200 + row] * response
            assert not any(tokens[prompt + response :])
            mask = batch.columns["response_mask"][index]
            assert mask.tolist() == [1.0] * response + [0.0] * (width - response)
            assert batch.columns["advantages"][index].tolist() == [(200 + row) / 8] * response + [0.0] * (
                width - response
            )
            assert float(batch.columns["scores"][index]) == row
            row += 1
    assert row == len(pairs)


def test_columns_are_cast_and_tokens_are_not() -> None:
    (batch,) = micro_batches(arrays([(2, 3)]), 4, None, torch.float32, CPU)
    assert batch.columns["advantages"].dtype == torch.float32
    assert batch.tokens.dtype == torch.int64


def test_a_unit_without_rows_has_no_micro_batch() -> None:
    empty = {name: array[:0] for name, array in arrays([(1, 1)]).items()}
    assert micro_batches(empty, 2, 8, torch.float32, CPU) == []
