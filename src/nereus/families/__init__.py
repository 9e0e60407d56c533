"""One file = one architecture: sizes, and how TP and PP cut each tensor. Names that every family shares stand here."""

EMBED = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
"""Learned positions."""
NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
SCORE = "score.weight"
"""The scalar head of a critic or reward model."""
