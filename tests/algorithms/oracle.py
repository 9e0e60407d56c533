"""RL arithmetic by definition, one sample and one token at a time: an oracle written apart from the library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

Columns = dict[str, Any]


def columns(seed: int, samples: int = 6, width: int = 7, group: int = 2, padding: float = 0.0) -> Columns:
    """A random step. Positions after a response hold `padding`."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, width + 1, samples)
    lengths[0] = width
    outside = np.arange(width)[None, :] >= lengths[:, None]

    def tokens(scale: float) -> Any:
        return np.where(outside, padding, scale * random.normal(size=(samples, width)))

    return {
        "response_tokens": np.where(outside, 0, random.integers(4, 14, (samples, width))),
        "response_lengths": lengths,
        "old_log_probs": tokens(1.0),
        "reference_log_probs": tokens(1.0),
        "values": tokens(0.7),
        "rewards": random.normal(size=samples),
        "greedy_rewards": random.normal(size=samples),
        "groups": 100 + np.arange(samples) // group,
    }


def penalised(c: Columns, sample: int, kl: float) -> list[float]:
    """Rewards of one sample's tokens: the KL penalty of each, the sample's reward on the last."""
    length = int(c["response_lengths"][sample])
    paid = [-kl * float(c["old_log_probs"][sample, t] - c["reference_log_probs"][sample, t]) for t in range(length)]
    paid[-1] += float(c["rewards"][sample])
    return paid


def gae(c: Columns, kl: float, gamma: float, lam: float) -> list[list[float]]:
    """A_t = sum over l of (gamma lam)^l delta_(t+l), as the paper writes it."""
    result = []
    for sample, length in enumerate(c["response_lengths"]):
        paid = penalised(c, sample, kl)
        values = [float(v) for v in c["values"][sample, :length]] + [0.0]
        deltas = [paid[t] + gamma * values[t + 1] - values[t] for t in range(length)]
        result.append([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)])
    return result


def remax(c: Columns, kl: float) -> list[list[float]]:
    """What is still to come minus the greedy answer's reward."""
    result = []
    for sample, length in enumerate(c["response_lengths"]):
        paid = penalised(c, sample, kl)
        result.append([sum(paid[t:]) - float(c["greedy_rewards"][sample]) for t in range(length)])
    return result


def grpo(c: Columns, scale: bool) -> list[float]:
    """(reward - mean of the group) / sample standard deviation of the group."""
    result = []
    for sample, group in enumerate(c["groups"]):
        rewards = torch.tensor([r for r, g in zip(c["rewards"], c["groups"], strict=True) if g == group])
        spread = float(rewards.std()) + 1e-6 if scale else 1.0
        result.append((float(c["rewards"][sample]) - float(rewards.mean())) / spread)
    return result


def whiten(rows: list[list[float]]) -> list[list[float]]:
    """Every token of the step has the same weight."""
    flat = [value for row in rows for value in row]
    mean = sum(flat) / len(flat)
    spread = math.sqrt(sum((value - mean) ** 2 for value in flat) / len(flat) + 1e-8)
    return [[(value - mean) / spread for value in row] for row in rows]


def padded(rows: list[list[float]], width: int) -> Any:
    """Rows of unequal length with zeros behind."""
    return np.array([row + [0.0] * (width - len(row)) for row in rows])


def token_losses(
    call: str, outputs: dict[str, torch.Tensor], c: Columns, clip: float, entropy: float, kl: float
) -> list[torch.Tensor]:
    """The loss of every response token: clipped policy (with entropy bonus and k3), or clipped value."""
    result = []
    for i, length in enumerate(c["response_lengths"]):
        for t in range(int(length)):
            if call == "update_critic":
                value, old, target = outputs["values"][i, t], c["values"][i, t], c["returns"][i, t]
                bounded = old + min(max(value - old, -clip), clip)
                result.append(0.5 * max((value - target) ** 2, (bounded - target) ** 2))
                continue
            new, advantage = outputs["log_probs"][i, t], c["advantages"][i, t]
            ratio = torch.exp(new - c["old_log_probs"][i, t])
            bounded = min(max(ratio, 1 - clip), 1 + clip)
            log_ratio = c["reference_log_probs"][i, t] - new
            k3 = torch.exp(log_ratio) - 1 - log_ratio
            policy = -min(ratio * advantage, bounded * advantage)
            result.append(policy - entropy * outputs["entropy"][i, t] + kl * k3)
    return result
