"""GRPO: advantages relative to the other answers to the same prompt, no critic, KL in the loss (arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.algorithms import _batch as batch
from nereus.algorithms import _losses as losses
from nereus.algorithms._base import PolicyGradient
from nereus.core import SettingsError, Workload
from nereus.core.ports import Columns


@dataclass(frozen=True, slots=True)
class Grpo(PolicyGradient):
    """`scale_by_std` divides a group's advantages by the standard deviation of its rewards."""

    scale_by_std: bool = True

    def check(self, workload: Workload) -> None:
        """A group needs two answers to compare. Raises SettingsError otherwise."""
        if workload.samples_per_prompt < 2:
            raise SettingsError(
                f"grpo: samples_per_prompt is {workload.samples_per_prompt}, must be at least 2: "
                "an answer is judged against the others to its prompt"
            )

    def advantages(self, columns: Columns) -> dict[str, Any]:
        """The normalised reward of each answer, on all its tokens."""
        mask = batch.response_mask(columns)
        rewards = batch.column(columns, "rewards")
        _, group = np.unique(np.asarray(columns["groups"]), return_inverse=True)
        size = np.bincount(group)
        centred = rewards - (np.bincount(group, rewards) / size)[group]
        if self.scale_by_std:
            deviation = np.sqrt(np.bincount(group, centred**2) / np.maximum(size - 1, 1))
            centred = centred / (deviation + 1e-6)[group]
        advantages = batch.masked(np.broadcast_to(centred[:, None], mask.shape), mask)
        return {"advantages": advantages, "returns": advantages, **batch.statistics(columns, advantages, mask)}

    def loss(self, call: str, outputs: Columns, columns: Columns) -> tuple[Any, dict[str, Any]]:
        """The clipped policy loss plus the divergence from the reference."""
        loss, sums = PolicyGradient.loss(self, call, outputs, columns)
        divergence, more = losses.kl_loss(outputs, columns)
        return loss + self.kl_coefficient * divergence, sums | more
