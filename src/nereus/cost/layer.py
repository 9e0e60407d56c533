"""One micro-batch through one decoder layer and through the two ends of a model: device seconds by operation class.

Matrix products have their real shapes, experts are balanced, attention is causal and done in tiles unless a constant
says that its scores are written. Kernels are launched by a host: what it needs is a floor under the device's time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.core import DTYPE_BYTES, Head, ModelSpec
from nereus.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s, by_link, reduce_scatter_s, send_s
from nereus.cost.kernels import attention_s, gemm_s, launched_s, stream_s
from nereus.cost.rows import Floats, Ints, Rows
from nereus.cost.site import Site
from nereus.cost.windows import seen_pairs

LAYER_KERNELS = 34
"""Operations of one decoder layer in one forward pass."""
END_KERNELS = 16
"""Operations of the embedding, or of the head with its log-probabilities."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`sequences` of `length` tokens by row, of which the head sees `head_tokens` in all."""

    sequences: Floats
    length: Floats
    head_tokens: Floats

    @property
    def tokens(self) -> Floats:
        """All its tokens."""
        return self.sequences * self.length


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one layer: `compute` on the device with the host's floor, and its collectives by class."""

    compute: Floats
    tp: Floats
    cp: Floats
    ep: Floats

    @property
    def parts(self) -> tuple[Floats, ...]:
        """In the order of the fields."""
        return self.compute, self.tp, self.cp, self.ep


@dataclass(frozen=True, slots=True)
class Block:
    """Prices the layers and ends of one model for one micro-batch by row."""

    spec: ModelSpec
    rows: Rows
    site: Site
    batch: MicroBatch

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return DTYPE_BYTES[self.spec.dtype]

    @property
    def wide_bytes(self) -> int:
        """Bytes of one logit or loss value."""
        return max(self.element_bytes, DTYPE_BYTES["fp32"])

    @property
    def tokens(self) -> Floats:
        """Tokens of a tp rank: those of the micro-batch, cut by context parallelism."""
        return self.batch.tokens / self.rows.cp

    @property
    def hidden_bytes(self) -> Floats:
        """The hidden state of these tokens."""
        return self.tokens * self.spec.hidden * self.element_bytes

    def passes(self, routed: bool, train: bool) -> tuple[Pass, ...]:
        """A layer forward, and in training backward; `routed` layers have experts.

        Backward come the gradients of inputs and weights; attention recomputes its scores. A layer that is recomputed
        whole is launched and run with them: where one of both waits for its host the other makes good for it.
        """
        products_s, attention_s = self.matrices_s(routed) + self.elementwise_s(routed), self.attention_s()
        kernels, moved = LAYER_KERNELS + self._unfused(), self._moved(routed)
        forward = self._pass(products_s + attention_s, kernels, moved, attention_s, 1.0)
        if not train:
            return (forward,)
        again, full = self.rows.recompute == 1, self.rows.recompute == 2
        gradients_s = self.site.rates["attention.backward"] * attention_s
        device_s = (2 + full) * products_s + gradients_s + (again | full) * attention_s
        kernels = (self.site.rates["launch.backward"] + full) * kernels
        moved = tuple((1 + full) * seconds for seconds in moved)
        return forward, self._pass(device_s, kernels, moved, gradients_s + full * attention_s, 2.0 + full)

    def attention_s(self) -> Floats:
        """Scores and weighted values of one layer, forward."""
        spec, heads = self.spec, _ceil(self.spec.heads, self.rows.tp)
        width = spec.head_dim
        if spec.kv_rank:
            width = (spec.head_dim + spec.rope_head_dim + spec.value_head_dim) / 2  # type: ignore[assignment]
        rates, batch = self.site.rates, self.batch
        written = rates["attention.scores"]
        products_s = attention_s(rates, batch.sequences, batch.length, heads, width, causal=not written)
        passes = written * self.element_bytes + 2 * self._unfused() * self.wide_bytes
        scores_s = stream_s(rates, passes * batch.sequences * heads * batch.length**2)
        seen = seen_pairs(spec, batch.length) if spec.window else 1.0
        return np.asarray(seen * (products_s + scores_s) / self.rows.cp)

    def _unfused(self) -> Floats:
        """Kernels that replace a fused softmax where it does not take this many sequences times heads."""
        rates, pairs = self.site.rates, self.batch.sequences * _ceil(self.spec.heads, self.rows.tp)
        return np.where(pairs % rates["attention.multiple"], rates["attention.unfused"], 0.0)

    def head_s(self, backward: bool = False) -> Floats:
        """Logits (or scores) of the head's tokens and their loss; the backward pass takes twice as long."""
        width, tokens = self._head_width(), self.batch.head_tokens / self.rows.cp
        logits_s = gemm_s(self.site.rates.wide, tokens, width, self.spec.hidden, self.element_bytes)
        loss_s = stream_s(self.site.rates, 4.0 * self.wide_bytes * tokens * width)
        factor = self.site.rates["launch.backward"] if backward else 1.0
        return self._launched((1 + backward) * (logits_s + loss_s), 0.0, factor * END_KERNELS)

    def head_tp_s(self) -> Floats:
        """Vocabulary-parallel loss: maximum, sum of exponentials, the target's logit."""
        if self.spec.head is Head.SCALAR:
            return np.zeros(len(self.rows))
        return 3 * self._all_reduce_s(self.batch.head_tokens / self.rows.cp * self.wide_bytes)

    def embedding_s(self) -> Floats:
        """Rows of the table read and written."""
        return self._launched(stream_s(self.site.rates, 2.0 * self.hidden_bytes), 0.0, END_KERNELS)

    def hidden_tp_s(self) -> Floats:
        """One collective pair over the hidden state: an all-reduce, or a gather and a scatter of sequence shards."""
        reduce_s = self._all_reduce_s(self.hidden_bytes)
        if not self.rows.sequence_parallel.any():
            return reduce_s
        tp, size, local = self.rows.tp, self.hidden_bytes, self._tp_local()
        pair_s = by_link(
            self.site,
            self.rows.tp_spans,
            lambda link: all_gather_s(link, tp, size, local) + reduce_scatter_s(link, tp, size, local),
        )
        return np.where(self.rows.sequence_parallel, pair_s, reduce_s)

    def _moved(self, routed: bool) -> tuple[Floats, ...]:
        """Collectives of one pass over a layer, of the tp group and of its experts."""
        pairs = np.where(self.rows.ep > 1, 1 + (self.spec.shared_experts > 0), 2) if routed else 2
        return pairs * self.hidden_tp_s(), 2 * self.experts_exchange_s() if routed else np.zeros(len(self.rows))

    def _pass(
        self,
        device_s: Floats,
        kernels: Floats,
        moved: tuple[Floats, ...],
        attention_s: Floats,
        exchanges: Floats | float,
    ) -> Pass:
        """`exchanges`: transfers of keys and values, 2 where their gradients travel too."""
        tp_s, ep_s = moved
        launches = kernels + np.where(self.rows.tp > 1, 2.0 * self.site.rates["launch.collective"], 0.0)
        compute_s = self._launched(device_s, tp_s + ep_s, launches)
        if not (self.rows.cp > 1).any():
            return Pass(compute_s, tp_s, np.zeros(len(self.rows)), ep_s)
        with_ring_s = self._launched(device_s + self._ring_s(exchanges, attention_s), tp_s + ep_s, launches)
        return Pass(compute_s, tp_s, with_ring_s - compute_s, ep_s)

    def _launched(self, device_s: Floats, collective_s: Floats | float, kernels: Floats | float) -> Floats:
        """Device time under the host's floor; what of a collective the host runs ahead of shortens the wait for it."""
        hidden_s = self.site.rates["launch.ahead"] * collective_s
        return launched_s(self.site.rates, device_s + hidden_s, kernels) - hidden_s

    def matrices_s(self, routed: bool) -> Floats:
        """The matrix products of one layer."""
        return self.outside_experts_s() + self._experts_s() if routed else self._dense_s()

    def _dense_s(self) -> Floats:
        return self.projections_s() + self._feed_forward_s(self.tokens, _ceil(self.spec.ffn_hidden, self.rows.tp))

    def outside_experts_s(self) -> Floats:
        """Those of a layer with experts that every token passes."""
        spec, tp = self.spec, self.rows.tp
        router_s = gemm_s(self.site.rates.wide, self.tokens, spec.experts, spec.hidden, self.element_bytes)
        found = self.projections_s() + router_s
        if spec.shared_experts:
            found = found + self._feed_forward_s(self.tokens, _ceil(spec.shared_experts * spec.expert_hidden, tp))
        return np.asarray(found)

    def projections_s(self) -> Floats:
        """Those of attention."""
        return self._latent_s() if self.spec.kv_rank else self._grouped_s()

    def _grouped_s(self) -> Floats:
        """Query, key, value and output projections."""
        spec = self.spec
        query = _ceil(spec.heads, self.rows.tp) * spec.head_dim
        keys = _ceil(spec.kv_heads, self.rows.tp) * spec.head_dim
        inputs_s = self._gemm_s(self.tokens, query + 2 * keys, spec.hidden)
        return inputs_s + self._gemm_s(self.tokens, spec.hidden, query)

    def _latent_s(self) -> Floats:
        """Compressions (on every tp rank), expansions by head, and the output projection."""
        spec, heads = self.spec, _ceil(self.spec.heads, self.rows.tp)
        query = heads * (spec.head_dim + spec.rope_head_dim)
        compress_s = self._gemm_s(self.tokens, spec.query_rank + spec.kv_rank + spec.rope_head_dim, spec.hidden)
        expand_s = self._gemm_s(self.tokens, query, spec.query_rank or spec.hidden)
        values_s = self._gemm_s(self.tokens, heads * (spec.head_dim + spec.value_head_dim), spec.kv_rank)
        return compress_s + expand_s + values_s + self._gemm_s(self.tokens, spec.hidden, heads * spec.value_head_dim)

    def _experts_s(self) -> Floats:
        return self.experts(self.site.rates["gemm.experts_share"])[0]

    def experts(self, share: float) -> tuple[Floats, Floats]:
        """Seconds of the chosen experts of all tokens in one group, and how many experts these are.

        The group reads the weights of those that are hit; its arithmetic reaches `share` of a single product's rate.
        """
        spec, rows, rates = self.spec, self.rows, self.site.rates
        width = _ceil(spec.expert_hidden, np.where(rows.ep > 1, 1, rows.tp))
        pairs = self.tokens * spec.experts_per_token / np.where(rows.ep > 1, rows.tp, 1)
        held = _ceil(spec.experts, rows.ep)
        hit = held * (1.0 - (1.0 - 1.0 / held) ** pairs)
        weights = (2 + spec.gated) * spec.hidden * width * hit * (rates.low_bytes or self.element_bytes)
        products_s = self._feed_forward_s(pairs, width) / share
        return np.maximum(products_s, weights / (rates.bytes_per_s * rates["gemm.stream"])), hit

    def _feed_forward_s(self, tokens: Floats, width: Ints) -> Floats:
        up_s = self._gemm_s(tokens, (1 + self.spec.gated) * width, self.spec.hidden)
        return up_s + self._gemm_s(tokens, self.spec.hidden, width)

    def _gemm_s(self, m: Floats, n: Ints | int, k: Ints | int) -> Floats:
        element_bytes = self.site.rates.low_bytes or self.element_bytes
        return gemm_s(self.site.rates, m, np.asarray(n), np.asarray(k), element_bytes)

    def elementwise_s(self, routed: bool) -> Floats:
        """Norms and residual sums, cut by sequence parallelism; rotations and the activation, cut by tp."""
        spec, tp = self.spec, self.rows.tp
        whole = 10 * spec.hidden / np.where(self.rows.sequence_parallel, tp, 1)
        heads = 4 * (_ceil(spec.heads, tp) + _ceil(spec.kv_heads, tp)) * spec.head_dim
        if routed:
            width = (spec.experts_per_token + spec.shared_experts) * spec.expert_hidden
            whole = whole + 4 * spec.experts_per_token * spec.hidden / tp
        else:
            width = spec.ffn_hidden
        elements = whole + heads + (2 + spec.gated) * _ceil(width, tp)
        factor = self.site.rates["stream.activation"]
        return stream_s(self.site.rates, factor * self.tokens * elements * self.element_bytes)

    def _ring_s(self, exchanges: Floats | float, attention_s: Floats) -> Floats:
        """Keys and values go round the cp ranks behind the attention of those at hand; what does not fit shows."""
        cp, spec = self.rows.cp, self.spec
        keys = 2 * _ceil(spec.kv_heads, self.rows.tp) * spec.head_dim
        if spec.kv_rank:
            keys = np.asarray(spec.kv_rank + spec.rope_head_dim)
        size = exchanges * self.tokens * keys * self.element_bytes
        turn_s = by_link(self.site, self.rows.cp_spans, lambda link: send_s(link, size))
        return np.where(cp > 1, np.maximum((cp - 1) * turn_s - attention_s * (cp - 1) / cp, 0.0), 0.0)

    def experts_exchange_s(self) -> Floats:
        """Chosen tokens travel to their experts, or back: between nodes once to each node, inside to each expert."""
        rows, chosen = self.rows, float(self.spec.experts_per_token)
        size = self.hidden_bytes / np.where(rows.ep > 1, rows.tp, 1)
        nodes = np.maximum(-(-rows.ep // rows.node), 2)
        left = nodes * (1 - (1 - 1 / nodes) ** chosen) * (1 - 1 / nodes) * rows.ep / np.maximum(rows.ep - 1, 1)
        copies = np.where(rows.ep_spans, np.minimum(left, chosen), chosen)
        return by_link(self.site, rows.ep_spans, lambda link: all_to_all_s(link, rows.ep, size * copies))

    def _all_reduce_s(self, size_bytes: Floats) -> Floats:
        tp, local = self.rows.tp, self._tp_local()
        return by_link(self.site, self.rows.tp_spans, lambda link: all_reduce_s(link, tp, size_bytes, local))

    def _tp_local(self) -> Ints:
        """Ranks of a tp group that spans nodes on the node with fewest of them."""
        return np.where(self.rows.tp_spans, np.minimum(self.rows.node, self.rows.tp), 1)

    def _head_width(self) -> Ints:
        if self.spec.head is Head.SCALAR:
            return np.ones_like(self.rows.tp)
        return _ceil(self.spec.vocab, self.rows.tp)


def _ceil(size: int, degree: Ints) -> Ints:
    return np.asarray(-(-size // degree))
