"""PPO: a critic, generalised advantage estimation, the KL penalty inside the reward (arXiv 1707.06347, 1506.02438)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.algorithms import _batch as batch
from nereus.algorithms import _calls as calls
from nereus.algorithms import _losses as losses
from nereus.algorithms._base import PolicyGradient
from nereus.core import Call
from nereus.core.ports import Columns


@dataclass(frozen=True, slots=True)
class Ppo(PolicyGradient):
    """`lam` is λ of the advantage estimate; `whiten` normalises advantages over the whole step's tokens."""

    gamma: float = 1.0
    lam: float = 0.95
    value_clip: float = 0.2
    whiten: bool = True

    def __post_init__(self) -> None:
        PolicyGradient.__post_init__(self)
        self.require("gamma", at_least=0.0, at_most=1.0)
        self.require("lam", at_least=0.0, at_most=1.0)
        self.require("value_clip", above=0.0)

    def calls(self) -> tuple[Call, ...]:
        """The calls of one RL step."""
        scores = (calls.REFERENCE_LOG_PROBS, *self.reward_calls())
        forward = (calls.GENERATE, *scores, calls.OLD_LOG_PROBS, calls.VALUES)
        with_actor = calls.with_update(forward, calls.UPDATE_ACTOR, calls.ACTOR_TRAINING)
        return calls.with_update(with_actor, calls.UPDATE_CRITIC, calls.CRITIC_TRAINING)

    def advantages(self, columns: Columns) -> dict[str, Any]:
        """Advantages and returns of every response token. The value after the last token is zero."""
        mask = batch.response_mask(columns)
        values = batch.masked(batch.column(columns, "values"), mask)
        following = np.zeros_like(values)
        following[:, :-1] = values[:, 1:]
        errors = batch.token_rewards(columns, mask, self.kl_coefficient) + self.gamma * following - values
        raw = batch.masked(batch.discounted_sums(errors, self.gamma * self.lam), mask)
        returns = raw + values
        advantages = batch.whitened(raw, mask) if self.whiten else raw
        return {
            "advantages": advantages,
            "returns": returns,
            **batch.statistics(columns, advantages, mask),
            "stat/critic/vf_explained_var": batch.explained_variance(returns, values, mask),
            "stat/critic/returns/mean": float(returns[mask].mean()),
            "stat/critic/values/mean": float(values[mask].mean()),
        }

    def loss(self, call: str, outputs: Columns, columns: Columns) -> tuple[Any, dict[str, Any]]:
        """The clipped policy loss of the actor, the clipped value loss of the critic."""
        if call == calls.UPDATE_CRITIC:
            return losses.value_loss(outputs, columns, self.value_clip)
        return PolicyGradient.loss(self, call, outputs, columns)
