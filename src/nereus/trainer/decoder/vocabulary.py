"""Vocabulary-parallel embedding and language-model head: full logits never exist in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from nereus.core import TensorSpec
from nereus.trainer.decoder.parallel import Axis, Hooks, leave

_NEVER = -1e30
"""Logit of a token that cannot be sampled: finite, so that 0 * logit stays 0, and exp() of it is 0."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The vocabulary rows of one tp rank: tokens `start..stop`, stored in `rows` rows of which the last are padding."""

    start: int
    stop: int
    rows: int

    @classmethod
    def of(cls, tensor: TensorSpec, tp: int, rank: int) -> VocabularyShard:
        """The shard of an embedding or head tensor."""
        return cls(*tensor.interval(tp, rank), tensor.local_shape(tp, rank)[0])

    def blocked(self, masked_tokens: Sequence[int], device: torch.device) -> torch.Tensor | None:
        """Which local rows are padding or masked tokens; None when all are real."""
        local = [token - self.start for token in masked_tokens if self.start <= token < self.stop]
        if not local and self.stop - self.start == self.rows:
            return None
        blocked = torch.zeros(self.rows, dtype=torch.bool, device=device)
        blocked[self.stop - self.start :] = True
        blocked[local] = True
        return blocked


def embed(tokens: torch.Tensor, table: torch.Tensor, shard: VocabularyShard, axis: Axis) -> torch.Tensor:
    """Rows of the embedding table for `tokens`, the same on every tp rank."""
    if axis.size == 1:
        return functional.embedding(tokens, table)
    elsewhere = (tokens < shard.start) | (tokens >= shard.stop)
    rows = functional.embedding((tokens - shard.start).masked_fill(elsewhere, 0), table)
    return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), axis)


@dataclass(frozen=True, slots=True)
class HeadContext:
    """What the head needs besides tensors."""

    shard: VocabularyShard
    blocked: torch.Tensor | None
    temperature: float
    dtype: torch.dtype
    axis: Axis
    hooks: Hooks


class _LogProbs(torch.autograd.Function):
    """Linear, temperature, log-softmax, pick and entropy in one, keeping one buffer of local logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        table: torch.Tensor,
        targets: torch.Tensor,
        head: HeadContext,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        logits = functional.linear(hidden, table).to(head.dtype)
        head.hooks.track("logits", logits)
        logits.div_(head.temperature)
        if head.blocked is not None:
            logits.masked_fill_(head.blocked, _NEVER)
        local = (targets - head.shard.start).clamp(0, head.shard.rows - 1)
        elsewhere = (targets < head.shard.start) | (targets >= head.shard.stop)
        picked = logits.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill_(elsewhere, 0)
        normalizer, log_probs, entropy = _combine(logits, picked, with_entropy, head.axis)
        log_probs.masked_fill_(log_probs < _NEVER / 10, -torch.inf)
        ctx.head = head
        ctx.save_for_backward(hidden, table, local, elsewhere, logits.sub_(normalizer.unsqueeze(1)), entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, entropy_gradient: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, table, local, elsewhere, log_p, entropy = ctx.saved_tensors
        if gradient is None:
            gradient = torch.zeros_like(entropy)
        weight = -gradient.unsqueeze(1)
        if entropy_gradient is not None:
            weight = (log_p + entropy.unsqueeze(1)).mul_(-entropy_gradient.unsqueeze(1)).add_(weight)
        # Runs once, so the saved buffer becomes the gradient of the logits.
        logits = log_p.exp_().mul_(weight)
        logits.scatter_add_(1, local.unsqueeze(1), gradient.masked_fill(elsewhere, 0).unsqueeze(1))
        logits = logits.div_(ctx.head.temperature).to(table.dtype)
        toward_hidden = logits @ table
        ctx.head.axis.all_reduce(toward_hidden)
        return toward_hidden, logits.T @ hidden, None, None, None


def _combine(
    logits: torch.Tensor, picked: torch.Tensor, with_entropy: bool, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(log of the normalizer, log-probs, entropy) from the local logits of every tp rank, in one exchange."""
    top = logits.amax(1)
    weights = (logits - top.unsqueeze(1)).exp_()
    parts = [top, weights.sum(1), picked]
    if with_entropy:
        parts.append(torch.linalg.vecdot(weights, logits))
    gathered = torch.stack(axis.all_gather(torch.stack(parts)))
    highest = gathered[:, 0].amax(0)
    scales = (gathered[:, 0] - highest).exp_()
    total = (scales * gathered[:, 1]).sum(0)
    normalizer = highest + total.log()
    log_probs = gathered[:, 2].sum(0) - normalizer
    entropy = normalizer - (scales * gathered[:, 3]).sum(0) / total if with_entropy else None
    return normalizer, log_probs, entropy


def log_probs(
    hidden: torch.Tensor, table: torch.Tensor, targets: torch.Tensor, head: HeadContext, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of `targets` [n] (and entropies) given normed hidden states [n, hidden], on every tp rank."""
    found: tuple[torch.Tensor, torch.Tensor | None] = _LogProbs.apply(hidden, table, targets, head, with_entropy)
    return found
