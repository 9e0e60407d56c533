"""Advantages of PPO, GRPO and ReMax against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.algorithms.grpo import Grpo
from nereus.algorithms.ppo import Ppo
from nereus.algorithms.remax import Remax
from tests.algorithms import oracle

ALGORITHMS = (Ppo(kl_coefficient=0.3, gamma=0.97), Grpo(), Remax(kl_coefficient=0.3))
SEEDS = st.integers(0, 2**20)


def arrays(result: Any) -> dict[str, Any]:
    return {name: value for name, value in result.items() if not name.startswith("stat/")}


@given(SEEDS, st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_ppo_gives_generalised_advantages(seed: int, gamma: float, lam: float, whiten: bool) -> None:
    c = oracle.columns(seed)
    made = Ppo(kl_coefficient=0.3, gamma=gamma, lam=lam, whiten=whiten).advantages(c)
    raw = oracle.gae(c, 0.3, gamma, lam)
    expected = oracle.padded(oracle.whiten(raw) if whiten else raw, 7)
    np.testing.assert_allclose(made["advantages"], expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(made["returns"], oracle.padded(raw, 7) + c["values"], rtol=1e-11, atol=1e-11)


@given(SEEDS, st.booleans())
def test_grpo_normalises_within_a_group(seed: int, scale: bool) -> None:
    c = oracle.columns(seed, group=3)
    made = Grpo(scale_by_std=scale).advantages(c)
    rows = [[a] * int(n) for a, n in zip(oracle.grpo(c, scale), c["response_lengths"], strict=True)]
    np.testing.assert_allclose(made["advantages"], oracle.padded(rows, 7), rtol=1e-9, atol=1e-9)


@given(SEEDS, st.booleans())
def test_remax_subtracts_the_greedy_reward(seed: int, whiten: bool) -> None:
    c = oracle.columns(seed)
    made = Remax(kl_coefficient=0.3, whiten=whiten).advantages(c)
    raw = oracle.remax(c, 0.3)
    expected = oracle.padded(oracle.whiten(raw) if whiten else raw, 7)
    np.testing.assert_allclose(made["advantages"], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_whatever_stands_in_the_padding_changes_nothing(algorithm: Any) -> None:
    clean = algorithm.advantages(oracle.columns(5))
    dirty = algorithm.advantages(oracle.columns(5, padding=float("nan")))
    for name in clean:
        np.testing.assert_array_equal(clean[name], dirty[name])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_wider_padding_changes_nothing(algorithm: Any) -> None:
    c = oracle.columns(6)
    wide = {k: np.pad(v, ((0, 0), (0, 4))) if v.ndim == 2 else v for k, v in c.items()}
    narrow, padded = arrays(algorithm.advantages(c)), arrays(algorithm.advantages(wide))
    for name, value in narrow.items():
        np.testing.assert_allclose(padded[name][:, :7], value, rtol=1e-13, atol=1e-13)
        assert not padded[name][:, 7:].any()


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_results_are_fp64_even_from_fp32_columns_and_the_columns_stay_as_they_were(algorithm: Any) -> None:
    c = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in oracle.columns(7).items()}
    before = {name: value.copy() for name, value in c.items()}
    for value in arrays(algorithm.advantages(c)).values():
        assert value.dtype == np.float64
    for name, value in before.items():
        np.testing.assert_array_equal(c[name], value)


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    c = oracle.columns(8) | {"rewards": np.full(6, 0.25)}
    assert not Grpo().advantages(c)["advantages"].any()


def test_statistics_are_token_means_under_metric_names() -> None:
    c = oracle.columns(9)
    made = Ppo(kl_coefficient=0.3).advantages(c)
    inside = [(i, t) for i, n in enumerate(c["response_lengths"]) for t in range(n)]
    kl = np.mean([c["old_log_probs"][p] - c["reference_log_probs"][p] for p in inside])
    returns = np.array([made["returns"][p] for p in inside])
    missed = returns - np.array([c["values"][p] for p in inside])
    assert made["stat/actor/kl"] == pytest.approx(kl, rel=1e-12)
    assert made["stat/critic/vf_explained_var"] == pytest.approx(1 - missed.var() / returns.var(), rel=1e-12)
    assert all(isinstance(value, float) for name, value in made.items() if name.startswith("stat/"))
