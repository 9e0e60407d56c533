"""What layers with a sliding window leave out of attention and of the KV cache, on average over a model's layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from nereus.core import ModelSpec
from nereus.cost.rows import Floats


def seen_pairs(spec: ModelSpec, tokens: ArrayLike) -> Floats:
    """Share of the pairs of a sequence's tokens (each with itself and earlier ones) that layers attend to."""
    if not spec.window:
        return np.ones(np.shape(tokens))
    window = np.minimum(spec.window / np.asarray(tokens), 1.0)
    return _over_layers(spec, window * (2.0 - window), np.ones_like(window))


def cached_tokens(spec: ModelSpec, tokens: ArrayLike) -> Floats:
    """Of a sequence of so many tokens those whose keys and values a layer holds, and a new token reads."""
    whole = np.asarray(tokens, dtype=float)
    return _over_layers(spec, np.minimum(whole, spec.window), whole) if spec.window else whole


def _over_layers(spec: ModelSpec, near: Floats, whole: Floats) -> Floats:
    return np.asarray(near + (whole - near) / spec.full_every)
