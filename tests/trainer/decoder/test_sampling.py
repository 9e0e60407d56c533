"""The hash behind sampling and the inverse CDF."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import SettingsError
from nereus.trainer.decoder.sampling import Sampling, choose, uniform


def splitmix(word: int) -> int:
    mask = (1 << 64) - 1
    word = (word + 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


@given(st.integers(-5, 2**64), st.integers(0, 2**40), st.integers(0, 2**62), st.integers(0, 2**20))
def test_uniform_is_a_hash_of_its_arguments(seed: int, step: int, sample: int, position: int) -> None:
    state = splitmix((seed % 2**64) ^ 0x9E3779B97F4A7C15)
    for word in (step, sample, position):
        state = splitmix(state ^ splitmix(word))
    found = uniform(seed, step, np.array([sample]), np.array([position]))
    assert found[0] == (state >> 11) / 2**53


def test_uniform_fills_the_interval_evenly_along_every_argument() -> None:
    ids = np.arange(20_000)
    zeros = np.zeros_like(ids)
    for numbers in (uniform(0, 0, ids, zeros), uniform(0, 0, zeros, ids), uniform(1, 3, ids, ids)):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 50
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_frequencies_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.25, 0.2, 0.05], dtype=torch.float64)
    n = 40_000
    logits = probabilities.log().expand(n, -1).clone()
    tokens = choose(logits, (np.arange(n) + 0.5) / n, Sampling(1))
    assert torch.allclose(torch.bincount(tokens, minlength=5).double() / n, probabilities, atol=1 / n, rtol=0)


def test_temperature_divides_the_logits() -> None:
    n = 10_000
    logits = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).expand(n, -1).clone()
    tokens = choose(logits, (np.arange(n) + 0.5) / n, Sampling(1, temperature=0.5))
    expected = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64).softmax(0)
    assert torch.allclose(torch.bincount(tokens, minlength=3).double() / n, expected, atol=2 / n, rtol=0)


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_breaks_ties_by_id() -> None:
    n = 1000
    u = (np.arange(n) + 0.5) / n
    logits = torch.tensor([0.1, 0.5, 0.1, 0.3], dtype=torch.float64).log().expand(n, -1)
    assert set(choose(logits.clone(), u, Sampling(1, top_p=0.5)).tolist()) == {1}
    assert set(choose(logits.clone(), u, Sampling(1, top_p=0.55)).tolist()) == {1, 3}
    assert set(choose(logits.clone(), u, Sampling(1, top_p=0.85)).tolist()) == {0, 1, 3}


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_a_token_without_weight_is_never_chosen(u: float) -> None:
    logits = torch.tensor([[-torch.inf, 3.0, 1.0, -torch.inf]], dtype=torch.float64)
    chosen = choose(logits.clone(), np.array([u]), Sampling(1, masked_tokens=(1,)))
    assert chosen.tolist() == [2]
    wide = torch.full((1, 1000), -torch.inf, dtype=torch.float64)
    wide[0, 10:990] = torch.randn(980, dtype=torch.float64) * 30
    assert 10 <= choose(wide, np.array([u]), Sampling(1)).item() < 990


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [9.0, 9.0, 9.0]])
    assert choose(logits, np.zeros(2), Sampling(1, greedy=True)).tolist() == [1, 0]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"max_response_tokens": 0}])
def test_wrong_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=next(iter(options))):
        Sampling(**{"max_response_tokens": 4, **options})  # type: ignore[arg-type]
