"""One file = one architecture: sizes, and how TP and PP cut each tensor. What every family shares stands here."""

from __future__ import annotations

from nereus.core import ModelSpec

EMBED = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
"""Learned positions."""
NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
SCORE = "score.weight"
"""The scalar head of a critic or reward model."""


def legal_ep(spec: ModelSpec, ranks: int) -> tuple[int, ...]:
    """Expert-parallel degrees, ascending: those that divide `ranks` (dp * cp * tp) and the number of experts."""
    return tuple(
        ep for ep in range(1, min(ranks, max(spec.experts, 1)) + 1) if not ranks % ep and not spec.experts % ep
    )


def expert_fault(spec: ModelSpec, ep: int, dp: int, cp: int, tp: int) -> str | None:
    """Why a model's experts cannot be cut `ep` ways, None when they can."""
    ranks = dp * cp * tp
    if ep == 1 or ep in legal_ep(spec, ranks):
        return None
    if not spec.experts:
        return f"ep {ep}, but {spec.family} has no experts: valid EP 1"
    return (
        f"ep {ep} must divide dp * cp * tp = {dp} * {cp} * {tp} = {ranks} and the {spec.experts} experts: "
        f"valid EP {', '.join(map(str, legal_ep(spec, ranks)))}"
    )
