"""One prefill and one decode step of a generation engine: seconds of a layer and of the ends of a model, by row.

Every matrix is read in every step; attention reads the cached keys and values (latent ones once for all heads); of the
experts those are read that the tokens chose, by kernels of the engine's own. Launches one by one, an all-reduce of an
engine's own, and what its scheduler takes between steps are constants of the device kind: engines are tuned to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.core import DTYPE_BYTES, Head, ModelSpec
from nereus.cost.cache import ELEMENT, kv_token_bytes
from nereus.cost.collectives import by_link, send_s
from nereus.cost.kernels import Numbers, decode_attention_s, gemm_s, launched_s, stream_s
from nereus.cost.layer import END_KERNELS, LAYER_KERNELS, Block, MicroBatch
from nereus.cost.rows import Floats, Rows
from nereus.cost.site import Site
from nereus.cost.windows import cached_tokens


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one pass: a dense layer, one with experts, embedding, head; a layer's reduction and exchange of
    experts; the gathering of logits. `hidden_bytes` go from one pp rank to the next, in `messages`."""

    dense: Floats
    routed: Floats
    embed: Floats
    head: Floats
    reduce: Floats
    exchange: Floats
    gather: Floats
    hidden_bytes: Floats
    messages: Floats

    def __add__(self, other: Parts) -> Parts:
        return Parts(*map(np.add, self._columns, other._columns))

    def __getitem__(self, rows: Any) -> Parts:
        return Parts(*(column[rows] for column in self._columns))

    def times(self, steps: Floats) -> Parts:
        """Of so many passes."""
        return Parts(*(steps * column for column in self._columns))

    def summed(self) -> Parts:
        """Sums over segments; the first axis goes."""
        return Parts(*(column.sum(axis=0) for column in self._columns))

    @property
    def _columns(self) -> tuple[Floats, ...]:
        """In the order of the fields."""
        return (
            self.dense, self.routed, self.embed, self.head, self.reduce, self.exchange, self.gather,
            self.hidden_bytes, self.messages,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """Prices passes of one model on a site."""

    spec: ModelSpec
    rows: Rows
    site: Site

    def __getitem__(self, name: str) -> float:
        """A constant by name."""
        return self.site.rates[name]

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation."""
        return DTYPE_BYTES[self.spec.dtype]

    @property
    def kv_bytes(self) -> float:
        """Bytes of one cached element."""
        return self[ELEMENT] or self.element_bytes

    @property
    def token_bytes(self) -> Floats:
        """KV cache of one token on the device that holds most layers."""
        return kv_token_bytes(self.spec, self.rows.tp, self.rows.layers_first, self.site.rates.named)

    def prefill(self, sequences: Floats, tokens: Numbers) -> Parts:
        """A forward pass over prompts of `tokens` tokens; the head sees their last ones alone."""
        block = Block(self.spec, self.rows, self.site, MicroBatch(sequences, np.asarray(tokens), sequences))
        return self._parts(block, block.attention_s(), 1.0, 1.0)

    def step(self, live: Floats, context: Floats) -> Parts:
        """One more token of `live` sequences, each with `context` tokens cached."""
        block = Block(self.spec, self.rows, self.site, MicroBatch(live, np.ones_like(live), live))
        return self._parts(block, self.cached_s(live, context), self["generation.launches"], self._own_reduce())

    def _own_reduce(self) -> Floats:
        """A decode step's all-reduce over the library's: engines have one of their own for a few ranks of a host."""
        rows = self.rows
        within = ~rows.tp_spans & (rows.tp <= self["generation.reduce_ranks"])
        return np.where(within, self["generation.reduce"], 1.0)

    def between_s(self, live: Floats) -> Floats:
        """What the scheduler takes after a step."""
        return self["generation.step_s"] + self["generation.sequence_s"] * live

    def _parts(self, block: Block, attention: Floats, launches: float, reduce: Floats | float) -> Parts:
        spec, rates, zeros = self.spec, self.site.rates, np.zeros(np.shape(block.tokens))
        dense = block.matrices_s(False) + attention + block.elementwise_s(False)
        routed = zeros
        if spec.experts:
            matrices_s = block.outside_experts_s() + self._experts_s(block)
            routed = matrices_s + attention + block.elementwise_s(True)
        kernels, ends = launches * LAYER_KERNELS, launches * END_KERNELS
        return Parts(
            dense=launched_s(rates, dense, kernels),
            routed=launched_s(rates, routed, kernels) if spec.experts else zeros,
            embed=launched_s(rates, 0.0, ends) + zeros,
            head=launched_s(rates, self._head_s(block.batch.head_tokens), ends) + zeros,
            reduce=reduce * block.hidden_tp_s() + zeros,
            exchange=(2 * block.experts_exchange_s() if spec.experts else zeros) + zeros,
            gather=self._gather_s(block.batch.head_tokens) + zeros,
            hidden_bytes=block.hidden_bytes + zeros,
            messages=zeros + 1.0,
        )

    def _experts_s(self, block: Block) -> Floats:
        """Tokens are sorted by expert; then each expert that is hit fills tiles of its own, however few its tokens."""
        seconds, hit = block.experts(self["generation.experts_share"])
        return self["generation.experts_start_s"] + self["generation.expert_s"] * hit + seconds

    def cached_s(self, live: Floats, context: Floats) -> Floats:
        """New tokens against cached ones. Latent attention reads one vector, for scores and values of all heads."""
        spec, tp, rates = self.spec, self.rows.tp, self.site.rates
        heads = -(-spec.heads // tp)
        if spec.kv_rank:
            half = (spec.kv_rank + spec.rope_head_dim) / 2
            read_s = decode_attention_s(rates, live, context, 1.0, half, self.kv_bytes, 2 * heads)
            return self["generation.latent_s"] + read_s
        keys, context = -(-spec.kv_heads // tp), cached_tokens(spec, context)
        return decode_attention_s(rates, live, context, keys, spec.head_dim, self.kv_bytes, heads)

    def _head_s(self, tokens: Floats) -> Floats:
        """Logits, and the choice of a token."""
        spec, rates = self.spec, self.site.rates
        width = -(-spec.vocab // self.rows.tp) if spec.head is Head.LM else np.ones_like(self.rows.tp)
        logits_s = gemm_s(rates.wide, tokens, width, spec.hidden, self.element_bytes)
        return np.asarray(logits_s + stream_s(rates, 4.0 * self._wide_bytes * tokens * width))

    def _gather_s(self, tokens: Floats) -> Floats:
        """The logits of the other tp ranks reach the one that chooses, which sends the token back."""
        rows = self.rows
        gathered = (rows.tp - 1) * tokens * self.spec.vocab / rows.tp * self._wide_bytes
        seconds = by_link(self.site, rows.tp_spans, lambda link: send_s(link, gathered) + link.latency_s)
        return np.where(rows.tp > 1, seconds, 0.0)

    @property
    def _wide_bytes(self) -> int:
        return max(self.element_bytes, DTYPE_BYTES["fp32"])
