"""ReMax: the reward of the greedy answer as baseline, no critic, KL inside the reward (arXiv 2310.10505)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nereus.algorithms import _batch as batch
from nereus.algorithms import _calls as calls
from nereus.algorithms._base import PolicyGradient
from nereus.core import Call
from nereus.core.ports import Columns


@dataclass(frozen=True, slots=True)
class Remax(PolicyGradient):
    """`whiten` normalises advantages over the whole step's tokens."""

    whiten: bool = True

    def calls(self) -> tuple[Call, ...]:
        """The calls of one RL step."""
        generation = (calls.GENERATE, calls.GENERATE_GREEDY)
        forward = (*generation, calls.REFERENCE_LOG_PROBS, *self.reward_calls(), calls.OLD_LOG_PROBS)
        return calls.with_update(forward, calls.UPDATE_ACTOR, calls.ACTOR_TRAINING)

    def reward_calls(self) -> tuple[Call, ...]:
        """The reward model scores the greedy answers too."""
        return (calls.REWARD_SCORES, calls.GREEDY_REWARD_SCORES) if self.reward_model else ()

    def advantages(self, columns: Columns) -> dict[str, Any]:
        """What is still to be earned from each token on, minus what the greedy answer earned."""
        mask = batch.response_mask(columns)
        rewards = batch.token_rewards(columns, mask, self.kl_coefficient)
        returns = batch.masked(batch.discounted_sums(rewards, 1.0), mask)
        raw = batch.masked(returns - batch.column(columns, "greedy_rewards")[:, None], mask)
        advantages = batch.whitened(raw, mask) if self.whiten else raw
        return {"advantages": advantages, "returns": returns, **batch.statistics(columns, advantages, mask)}
