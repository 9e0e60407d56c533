"""What one token leaves in memory inside one layer on one device, in elements of the model's dtype."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.core import DTYPE_BYTES, ModelSpec
from nereus.cost.rows import Floats, Rows


@dataclass(frozen=True, slots=True)
class Widths:
    """Elements a token of the fullest tp rank; columns. `ffn` and `expert_ffn` are of one feed-forward block each.

    `norm` is what a norm keeps for its backward, `residual` the token's state between layers, `attention` query, keys,
    values and output with what makes them. With sequence parallelism norms and states are cut by tp.
    """

    residual: Floats
    norm: Floats
    query: Floats
    keys: Floats
    attention: Floats
    ffn: Floats
    expert_ffn: Floats
    dispatched: Floats
    gated: bool

    @classmethod
    def of(cls, spec: ModelSpec, rows: Rows, norm_copies: float) -> Widths:
        """The widths of rows. A norm keeps `norm_copies` wide copies of its input, at least itself."""
        element_bytes = DTYPE_BYTES[spec.dtype]
        wide = max(element_bytes, DTYPE_BYTES["fp32"]) / element_bytes
        residual = spec.hidden / np.where(rows.sequence_parallel, rows.tp, 1)
        heads, kv_heads = np.ceil(spec.heads / rows.tp), np.ceil(spec.kv_heads / rows.tp)
        query, keys = heads * spec.head_dim, kv_heads * spec.head_dim
        attention = 2 * (query + keys) * (1 + wide * spec.qk_norm)
        if spec.kv_rank:
            query, keys = heads * (spec.head_dim + spec.rope_head_dim), heads * spec.value_head_dim
            latents = spec.query_rank + spec.kv_rank + spec.rope_head_dim
            attention = 2 * (query + keys) + latents * (1 + max(norm_copies * wide, 1))
        chosen = spec.experts_per_token
        # Experts are whole on a rank where ep cuts them and see the tokens of their group; else all see all, cut by tp.
        expert_ffn = (chosen * spec.expert_hidden + spec.shared_experts * spec.expert_hidden) / rows.tp
        return cls(
            residual=residual,
            norm=residual * (1 + max(norm_copies * wide, 1)),
            query=query,
            keys=keys,
            attention=attention,
            ffn=np.ceil(spec.ffn_hidden / rows.tp),
            expert_ffn=expert_ffn,
            dispatched=2.0 * chosen * spec.hidden / np.where(rows.ep > 1, rows.tp, 1),
            gated=spec.gated,
        )

    @property
    def ffn_kept(self) -> Floats:
        """Of a dense block: gate, its activation, up and their product; without a gate up and its activation."""
        return (4 if self.gated else 2) * self.ffn

    @property
    def experts_kept(self) -> Floats:
        """Of a block with experts: the same for each chosen one, what was sent to them and what came back."""
        return (4 if self.gated else 2) * self.expert_ffn + self.dispatched

    def kept(self, experts: bool) -> Floats:
        """What autograd saves of one layer until its backward.

        Counted on PyTorch 2.13 with eager norms (fp32, bf16, with and without grouped queries): within 4 %.
        """
        return 2 * self.norm + self.attention + (self.experts_kept if experts else self.ffn_kept)

    def working(self, experts: bool) -> Floats:
        """Alive at once inside one layer without autograd: the larger of attention and feed-forward."""
        block = 3 * self.expert_ffn + self.dispatched if experts else 3 * self.ffn
        return 3 * self.residual + np.maximum(3 * self.query + 4 * self.keys, block)
