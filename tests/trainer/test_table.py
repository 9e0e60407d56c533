"""The sample table: ragged tokens, shares, mini-batches and aligned parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.trainer.table import SampleTable, align, mini_batches, padded, shares

ragged = st.lists(st.lists(st.integers(1, 99), max_size=7), min_size=1, max_size=9)


def table(samples: int = 3) -> SampleTable:
    return SampleTable(0, np.arange(samples, dtype=np.int64))


@given(ragged)
def test_ragged_tokens_come_back_as_they_went_in(sequences: list[list[int]]) -> None:
    made = table(len(sequences))
    made.set_tokens("response", sequences)
    rows = np.arange(len(sequences))[::-1]
    assert made.tokens("response", rows) == sequences[::-1]
    assert made.mask().sum(axis=1).tolist() == [len(sequence) for sequence in sequences]


def test_padding_is_zero_and_at_least_one_column_wide() -> None:
    tokens, lengths = padded([[], []])
    assert (tokens.shape, lengths.tolist()) == ((2, 1), [0, 0])
    tokens, _ = padded([[5, 6, 7], [8]])
    assert tokens.tolist() == [[5, 6, 7], [8, 0, 0]]


def test_rows_gives_the_columns_that_exist() -> None:
    made = table()
    made.columns["values"] = np.array([[1.0], [2.0], [3.0]])
    found = made.rows(np.array([2, 0]), ("values", "returns"))
    assert {name: column.tolist() for name, column in found.items()} == {"values": [[3.0], [1.0]]}


@given(st.integers(0, 40), st.integers(1, 12))
def test_shares_are_consecutive_ceil_or_floor_and_larger_first(count: int, parts: int) -> None:
    found = shares(count, parts)
    assert np.concatenate(found).tolist() == list(range(count))
    sizes = [len(part) for part in found]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_every_epoch_uses_each_sample_once(seed: int, step: int, size: int, batches: int, epochs: int) -> None:
    samples = size * batches
    found = mini_batches(seed, step, samples, size, epochs)
    assert [len(batch) for batch in found] == [size] * batches * epochs
    for epoch in range(epochs):
        used = np.concatenate(found[epoch * batches : (epoch + 1) * batches])
        assert sorted(used.tolist()) == list(range(samples))


def test_mini_batches_depend_on_seed_step_and_epoch_alone() -> None:
    def order(seed: int, step: int, epochs: int = 1) -> list[int]:
        return [int(row) for batch in mini_batches(seed, step, 24, 6, epochs) for row in batch]

    assert order(1, 2) == order(1, 2)
    first, second = order(1, 2, epochs=2)[:24], order(1, 2, epochs=2)[24:]
    assert first == order(1, 2)
    assert len({tuple(first), tuple(second), tuple(order(1, 3)), tuple(order(2, 2))}) == 4


def test_parts_of_units_are_put_back_in_their_rows() -> None:
    wide, narrow = np.array([[1.0, 2.0, 3.0]]), np.array([[4.0], [5.0]])
    column = align([narrow, wide], [np.array([0, 2]), np.array([1])], (3, 3))
    assert column.tolist() == [[4.0, 0, 0], [1.0, 2.0, 3.0], [5.0, 0, 0]]
    assert align([np.array([7.0]), np.array([8.0])], [np.array([1]), np.array([0])], (2,)).tolist() == [8.0, 7.0]


@pytest.mark.parametrize("samples", [1, 5])
def test_samples_are_counted(samples: int) -> None:
    assert table(samples).samples == samples
