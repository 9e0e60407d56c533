"""Choosing tokens without generator state: a counter-based hash gives the uniform number of every token (D5.7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nereus.core import SettingsError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled. A stop token ends a response and belongs to it; masked tokens are never sampled."""

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False
    stop_tokens: tuple[int, ...] = ()
    masked_tokens: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_response_tokens < 1:
            raise SettingsError(f"sampling: max_response_tokens is {self.max_response_tokens}, must be at least 1")
        if self.temperature <= 0:
            raise SettingsError(f"sampling: temperature is {self.temperature}, must be positive (greedy: true for 0)")
        if not 0 < self.top_p <= 1:
            raise SettingsError(f"sampling: top_p is {self.top_p}, must be above 0 and at most 1")


def uniform(seed: int, step: int, sample_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (sample, position of the response token), a function of its arguments alone."""
    state = _mixed(np.uint64(seed & _MASK) ^ _GOLDEN)
    for word in (np.uint64(step & _MASK), sample_ids.astype(np.uint64), positions.astype(np.uint64)):
        state = _mixed(state ^ _mixed(word))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(logits: torch.Tensor, u: NDArray[np.float64], sampling: Sampling) -> torch.Tensor:
    """Token ids [n] for logits [n, vocabulary]: the highest (lowest id on ties) or the inverse CDF at `u`, in fp64."""
    logits = logits.to(torch.float64)
    if sampling.masked_tokens:
        logits[:, list(sampling.masked_tokens)] = -torch.inf
    if sampling.greedy:
        return logits.argmax(1)
    top = logits.amax(1, keepdim=True)
    weights = logits.sub_(top).div_(sampling.temperature).exp_()
    if sampling.top_p < 1:
        _keep_top(weights, sampling.top_p)
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1:]
    # Below the total even after rounding, so that the token found always has a weight.
    target = torch.minimum(torch.from_numpy(u).to(total).unsqueeze(1) * total, torch.nextafter(total, 0 * total))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _keep_top(weights: torch.Tensor, top_p: float) -> None:
    """Zero all but the smallest set of highest weights that holds `top_p` of the total; ties keep the lowest id."""
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(1) - ordered
    dropped = before >= top_p * ordered.sum(1, keepdim=True)
    weights.masked_fill_(torch.zeros_like(dropped).scatter_(1, order, dropped), 0)


def _mixed(word: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """The splitmix64 finaliser; arithmetic wraps."""
    with np.errstate(over="ignore"):
        word = np.asarray(word + _GOLDEN)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))
