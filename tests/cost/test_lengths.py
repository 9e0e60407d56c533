"""Length distributions."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import Lengths
from nereus.cost.lengths import at, decode_profile, padded


def test_measured_quantiles_are_read_back() -> None:
    lengths = Lengths.measured([10, 20, 30, 40, 50], levels=5)
    assert [at(lengths, level) for level in (0.0, 0.25, 0.5, 1.0)] == [10, 20, 30, 50]
    assert at(lengths, 0.125) == pytest.approx(15)


def test_without_quantiles_mean_and_p95_are_met() -> None:
    lengths = Lengths(100, 180, 1000)
    levels = [(index + 0.5) / 4000 for index in range(4000)]
    assert sum(at(lengths, level) for level in levels) / 4000 == pytest.approx(100, rel=0.01)
    assert at(lengths, 0.95) == pytest.approx(180, rel=0.01)


def test_no_length_exceeds_the_maximum() -> None:
    assert at(Lengths(100, 180, 190), 0.9999) == 190


def test_larger_micro_batches_are_padded_further() -> None:
    sizes = [padded(Lengths(100, 180, 300), sequences) for sequences in (1, 2, 8, 64)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4


@pytest.mark.parametrize("lengths", [Lengths(100, 180, 300), Lengths(100, 400, 4000), Lengths(300, 900, 1000)])
def test_one_sequence_alone_is_as_long_as_the_mean(lengths: Lengths) -> None:
    assert padded(lengths, 1) == lengths.mean
    assert padded(lengths, 1) < padded(lengths, 2) < padded(lengths, 3)


@pytest.mark.parametrize("sequences", [2, 4, 16, 200])
@pytest.mark.parametrize("lengths", [Lengths(100, 250, 400), Lengths.measured([5, 5, 8, 9, 12, 30, 80, 200])])
def test_padding_is_what_drawn_micro_batches_are_padded_to(lengths: Lengths, sequences: int) -> None:
    draw = random.Random(sequences)
    drawn = [max(at(lengths, draw.random()) for _ in range(sequences)) for _ in range(4000)]
    assert padded(lengths, sequences) == pytest.approx(sum(drawn) / len(drawn), rel=0.04)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(1, 100))
def test_a_decode_profile_shrinks_to_the_longest_sequence(values: list[int], sequences: int) -> None:
    ends, live = decode_profile(Lengths.measured(values), sequences)
    assert live[0] == sequences
    assert ends[-1] == max(values)
    assert all(a <= b for a, b in pairwise(ends))
    assert all(a >= b for a, b in pairwise(live))
    assert live[-1] >= 1


def test_a_decode_profile_generates_about_the_mean() -> None:
    lengths = Lengths.measured([4, 8, 8, 12, 20, 30, 30, 40] * 8)
    ends, live = decode_profile(lengths, 64)
    steps = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    tokens = sum(step * count for step, count in zip(steps, live, strict=True))
    assert tokens / 64 == pytest.approx(lengths.mean, rel=0.1)
