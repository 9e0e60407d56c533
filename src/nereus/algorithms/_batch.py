"""Arithmetic on the columns of a whole RL step: fp64 numpy, zero outside the responses (D5.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.core.ports import Columns

Array = NDArray[np.float64]


def column(columns: Columns, name: str) -> Array:
    """A column in fp64."""
    return np.asarray(columns[name], dtype=np.float64)


def response_mask(columns: Columns) -> NDArray[np.bool_]:
    """True on the response tokens of each sample."""
    width = columns["response_tokens"].shape[1]
    mask: NDArray[np.bool_] = np.arange(width)[None, :] < np.asarray(columns["response_lengths"])[:, None]
    return mask


def masked(values: Array, mask: NDArray[np.bool_]) -> Array:
    """`values` with zeros outside the mask, whatever stood there."""
    return np.where(mask, values, 0.0)


def whitened(values: Array, mask: NDArray[np.bool_]) -> Array:
    """Zero mean and unit variance over every response token of the step."""
    inside = values[mask]
    return masked((values - inside.mean()) / np.sqrt(inside.var() + 1e-8), mask)


def log_ratio(columns: Columns, mask: NDArray[np.bool_]) -> Array:
    """log(actor / reference) of each sampled token, whose mean estimates the KL divergence."""
    return masked(column(columns, "old_log_probs") - column(columns, "reference_log_probs"), mask)


def token_rewards(columns: Columns, mask: NDArray[np.bool_], kl_coefficient: float) -> Array:
    """The KL penalty of each token, and the sample's reward on its last one."""
    rewards = -kl_coefficient * log_ratio(columns, mask)
    last = np.asarray(columns["response_lengths"]) - 1
    rewards[np.arange(len(last)), last] += column(columns, "rewards")
    return masked(rewards, mask)


def discounted_sums(values: Array, discount: float) -> Array:
    """sum over k >= t of discount^(k-t) * values[k], along each row."""
    sums = np.zeros_like(values)
    running = np.zeros(len(values))
    for position in reversed(range(values.shape[1])):
        running = values[:, position] + discount * running
        sums[:, position] = running
    return sums


def explained_variance(returns: Array, values: Array, mask: NDArray[np.bool_]) -> float:
    """Share of the variance of the returns that the critic predicted; 0 for constant returns."""
    total = returns[mask].var()
    return float(1.0 - (returns - values)[mask].var() / total) if total > 0 else 0.0


def statistics(columns: Columns, advantages: Array, mask: NDArray[np.bool_]) -> dict[str, Any]:
    """What every algorithm reports of a step."""
    inside = advantages[mask]
    return {
        "stat/actor/kl": float(log_ratio(columns, mask)[mask].mean()),
        "stat/actor/advantages/mean": float(inside.mean()),
        "stat/actor/advantages/max": float(inside.max()),
        "stat/actor/advantages/min": float(inside.min()),
    }
