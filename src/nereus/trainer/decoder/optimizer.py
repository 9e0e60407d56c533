"""AdamW on the local shards of a position, addressed by tensor name and kind; it keeps no state of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.adamw import adamw

from nereus.core import Kind
from nereus.trainer.config import OptimizerConfig

State = Mapping[tuple[str, Kind], torch.Tensor]


def step(
    state: State, gradients: Mapping[str, torch.Tensor], options: OptimizerConfig, update: int, clip_scale: float = 1.0
) -> None:
    """Apply update number `update` (from 0) in place; gradients are scaled in place by `clip_scale`.

    Moments and masters are updated in their own dtype; half-precision parameters are written from their masters.
    Nothing here counts: who calls it twice with one number applies it twice.
    """
    names = list(gradients)
    weights = [state.get((name, Kind.MASTER), state[name, Kind.PARAM]) for name in names]
    with torch.no_grad():
        if clip_scale != 1.0:
            for gradient in gradients.values():
                gradient.mul_(clip_scale)
        adamw(
            weights,
            [gradients[name] for name in names],
            [state[name, Kind.EXP_AVG] for name in names],
            [state[name, Kind.EXP_AVG_SQ] for name in names],
            [],
            # The fused kernel counts each of these up by one before it uses it.
            list(torch.full((len(names),), float(update), device=weights[0].device).unbind()) if names else [],
            fused=True,
            amsgrad=False,
            beta1=options.betas[0],
            beta2=options.betas[1],
            lr=options.rate(update),
            weight_decay=options.weight_decay,
            eps=options.eps,
            maximize=False,
        )
        for name, weight in zip(names, weights, strict=True):
            parameter = state[name, Kind.PARAM]
            if parameter is not weight:
                parameter.copy_(weight)


def clip_scale(norm: float, maximum: float | None) -> float:
    """What gradients are multiplied by so that their global norm is at most `maximum`."""
    if maximum is None or norm <= maximum:
        return 1.0
    return maximum / norm
