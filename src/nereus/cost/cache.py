"""Bytes of a generation engine's KV cache: one function for the time to read it and the memory that it takes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nereus.core import DTYPE_BYTES, ModelSpec
from nereus.cost.rows import Floats, Ints

ELEMENT = "generation.kv_bytes"
"""Constant of a device kind: bytes of one cached element, where not those of the model."""


def kv_token_bytes(spec: ModelSpec, tp: Ints, layers: Ints, constants: Mapping[str, float]) -> Floats:
    """Cache of one token that all of so many layers hold, on a device of a kind with these constants.

    Latent attention caches one vector, whole on every tp rank.
    """
    keys = 2 * -(-spec.kv_heads // tp) * spec.head_dim
    if spec.kv_rank:
        keys = np.full_like(tp, spec.kv_rank + spec.rope_head_dim)
    return np.asarray(keys * layers * float(constants.get(ELEMENT) or DTYPE_BYTES[spec.dtype]))
