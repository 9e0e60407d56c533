"""Losses summed over response tokens. Only methods of the tensors they are given, so that no torch import is needed.

Each returns the sum and a dict of detached sums to report; who calls divides both by the algorithm's denominator.
Masked positions are filled before any arithmetic: padding may hold anything, infinities included.
"""

from __future__ import annotations

from typing import Any

from nereus.core.ports import Columns

Loss = tuple[Any, dict[str, Any]]


def policy_loss(outputs: Columns, columns: Columns, clip: float, entropy_coefficient: float) -> Loss:
    """PPO's clipped surrogate, minus an entropy bonus."""
    padding = columns["response_mask"] == 0
    log_ratio = (outputs["log_probs"] - columns["old_log_probs"]).masked_fill(padding, 0.0)
    advantages = columns["advantages"].masked_fill(padding, 0.0)
    entropy = outputs["entropy"].masked_fill(padding, 0.0).sum()
    ratio = log_ratio.exp()
    free, clipped = ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages
    surrogate = -free.minimum(clipped).sum()
    sums = {
        "pg_loss": surrogate.detach(),
        "pg_clipfrac": (clipped < free).sum(),
        "ppo_kl": -log_ratio.detach().sum(),
        "entropy": entropy.detach(),
    }
    return surrogate - entropy_coefficient * entropy, sums


def kl_loss(outputs: Columns, columns: Columns) -> Loss:
    """The k3 estimate of KL(actor, reference): r - log r - 1 with r = reference / actor; never negative."""
    padding = columns["response_mask"] == 0
    log_ratio = (columns["reference_log_probs"] - outputs["log_probs"]).masked_fill(padding, 0.0)
    divergence = (log_ratio.exp() - log_ratio - 1.0).sum()
    return divergence, {"kl_loss": divergence.detach()}


def value_loss(outputs: Columns, columns: Columns, value_clip: float) -> Loss:
    """Half the squared error against the returns; a step beyond `value_clip` from the old value earns nothing."""
    padding = columns["response_mask"] == 0
    values = outputs["values"].masked_fill(padding, 0.0)
    old = columns["values"].masked_fill(padding, 0.0)
    returns = columns["returns"].masked_fill(padding, 0.0)
    free = (values - returns) ** 2
    clipped = (old + (values - old).clamp(-value_clip, value_clip) - returns) ** 2
    loss = 0.5 * free.maximum(clipped).sum()
    sums = {
        "vf_loss": loss.detach(),
        "vf_clipfrac": (clipped > free).sum(),
        "vpred_mean": values.detach().sum(),
    }
    return loss, sums
