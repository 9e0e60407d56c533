"""Seconds of generation: prefill, then one token at a time while the batch shrinks as sequences end (D7.2).

A unit holds as many sequences at once as its KV budget allows (`Rows.micro_batch` when `Rows.kv_bytes` is set, its
whole share otherwise) and works through its share in such waves. A token passes all pp ranks in turn, so that at any
time one of them works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nereus.core import DTYPE_BYTES, Head, ModelSpec, Workload
from nereus.cost.collectives import all_reduce_s, by_link, send_s
from nereus.cost.kernels import attention_s, decode_attention_s, gemm_s, launched_s, stream_s
from nereus.cost.lengths import GROUPS, decode_profile
from nereus.cost.operations import DISPATCH_S, FORWARD_KERNELS, HEAD_KERNELS
from nereus.cost.prices import CallPrices
from nereus.cost.rows import Floats, Ints, Rows
from nereus.cost.site import Site

Seconds = Mapping[str, Floats]
"""Operation class → ideal seconds by row."""


def generate(spec: ModelSpec, rows: Rows, workload: Workload, site: Site) -> CallPrices:
    """The generation of a whole step's batch on the unit with the largest share."""
    share = -(-workload.sequences // rows.dp)
    live = np.where(rows.kv_bytes > 0, np.minimum(share, rows.micro_batch), share)
    waves = np.ceil(share / live)
    pass_ = _Pass(spec, rows, workload, site)
    prefill, decode = pass_.prefill(live), pass_.decode(live)
    totals = [_added(prefill[rank], decode[rank]) for rank in range(3)]
    weights = np.array([site.weigh(total) for total in totals])
    counts = np.array([np.ones(len(rows)), np.maximum(rows.pp - 2, 0), rows.pp > 1])
    busiest = np.argmax(np.where(counts > 0, weights, -1.0), axis=0)
    wait_s = (counts * weights).sum(axis=0) - np.take_along_axis(weights, busiest[None], 0)[0]
    ideal = {name: waves * np.choose(busiest, [total[name] for total in totals]) for name in totals[0]}
    ideal["pp"] = ideal["pp"] + waves * wait_s * site.efficiency("pp").value
    ideal["dispatch"] = np.full(len(rows), DISPATCH_S)
    return CallPrices(site.weigh(ideal), ideal)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one wave costs on the first, a middle and the last pp rank."""

    spec: ModelSpec
    rows: Rows
    workload: Workload
    site: Site

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.spec.dtype]

    @property
    def layers(self) -> tuple[Ints, Ints, Ints]:
        return self.rows.layers_first, self.rows.layers_middle, self.rows.layers_last

    def prefill(self, live: Floats) -> list[Seconds]:
        """One forward pass over padded prompts; the head sees their last tokens alone."""
        prompt, tp = self.workload.prompt.maximum, self.rows.tp
        tokens = live * prompt
        attention = attention_s(self.site.rates, live, prompt, self._heads(tp), self.spec.head_dim)
        layer_s = self._launched(self._matrices_s(tokens) + attention + self._stream_s(tokens), FORWARD_KERNELS)
        return self._by_rank("prefill", np.ones(1), layer_s[None], live[None], tokens[None])

    def decode(self, live: Floats) -> list[Seconds]:
        """One step after another, in segments in which the same sequences are alive."""
        steps, ends, alive = segments(self.workload, live)
        context = self.workload.prompt.maximum + ends - steps / 2
        keys = -(-self.spec.kv_heads // self.rows.tp)
        cache_s = decode_attention_s(
            self.site.rates, alive, context, keys, self.spec.head_dim, self.element_bytes, self._heads(self.rows.tp)
        )
        layer_s = self._launched(self._matrices_s(alive) + cache_s + self._stream_s(alive), FORWARD_KERNELS)
        return self._by_rank("decode", steps, layer_s, alive, alive)

    def _by_rank(self, name: str, steps: Floats, layer_s: Floats, live: Floats, tokens: Floats) -> list[Seconds]:
        """Sums over segments. The first pp rank embeds, the last chooses tokens."""
        rows = self.rows
        found: list[Seconds] = []
        hidden_bytes = tokens * self.spec.hidden * self.element_bytes
        reduce_s = by_link(self.site, rows.tp_spans, lambda link: all_reduce_s(link, rows.tp, hidden_bytes))
        send = by_link(self.site, rows.pp_spans, lambda link: send_s(link, hidden_bytes))
        back = np.where(rows.pp > 1, by_link(self.site, rows.pp_spans, lambda link: send_s(link, live * 0.0)), 0.0)
        embed_s, choose_s = self._launched(tokens * 0.0, HEAD_KERNELS), self._head_s(live)
        gather_s = self._gather_s(live)
        for rank, layers in enumerate(self.layers):
            first, last = rank == 0, (rank == 2) | ((rank == 0) & (rows.pp == 1))
            neighbours = np.where(rows.pp > 1, 2 - first - (rank == 2), 0)
            compute = layers * layer_s + first * embed_s + last * choose_s
            tp = (2 * layers + first) * reduce_s + last * gather_s
            pp = neighbours * send + (back if name == "decode" else 0.0)
            found.append({name: _sum(steps, compute), "tp": _sum(steps, tp), "pp": _sum(steps, pp)})
        return found

    def _launched(self, device_s: Floats, kernels: float) -> Floats:
        return launched_s(self.site.rates, device_s, kernels)

    def _heads(self, tp: Ints) -> Ints:
        return np.asarray(-(-self.spec.heads // tp))

    def _matrices_s(self, tokens: Floats) -> Floats:
        """The matrix products of one layer."""
        spec, tp, rates, width = self.spec, self.rows.tp, self.site.rates, self.element_bytes
        query = self._heads(tp) * spec.head_dim
        keys = -(-spec.kv_heads // tp) * spec.head_dim
        ffn = -(-spec.ffn_hidden // tp)
        return np.asarray(
            gemm_s(rates, tokens, query + 2 * keys, spec.hidden, width)
            + gemm_s(rates, tokens, spec.hidden, query, width)
            + gemm_s(rates, tokens, (1 + spec.gated) * ffn, spec.hidden, width)
            + gemm_s(rates, tokens, spec.hidden, ffn, width)
        )

    def _stream_s(self, tokens: Floats) -> Floats:
        """Norms, residuals, rotary and activation of one layer."""
        spec, tp = self.spec, self.rows.tp
        elements = 6 * spec.hidden + 2 * self._heads(tp) * spec.head_dim + 3 * -(-spec.ffn_hidden // tp)
        return stream_s(self.site.rates, tokens * elements * self.element_bytes)

    def _head_s(self, live: Floats) -> Floats:
        """Logits, and the choice of a token."""
        spec = self.spec
        width = -(-spec.vocab // self.rows.tp) if spec.head is Head.LM else np.ones_like(self.rows.tp)
        logits = gemm_s(self.site.rates, live, width, spec.hidden, self.element_bytes)
        wide = max(self.element_bytes, DTYPE_BYTES["fp32"])
        return self._launched(logits + stream_s(self.site.rates, 4.0 * wide * live * width), HEAD_KERNELS)

    def _gather_s(self, live: Floats) -> Floats:
        """The logits of the other tp ranks reach the one that chooses, which sends the token back."""
        rows, wide = self.rows, max(self.element_bytes, DTYPE_BYTES["fp32"])
        gathered = (rows.tp - 1) * live * self.spec.vocab / rows.tp * wide
        send = by_link(self.site, rows.tp_spans, lambda link: send_s(link, gathered) + link.latency_s)
        return np.where(rows.tp > 1, send, 0.0)


def segments(workload: Workload, live: Floats) -> tuple[Floats, Floats, Floats]:
    """(steps, ends, alive), each [segment, row]: decode steps, the token count they reach, sequences still alive."""
    counts, index = np.unique(live.astype(np.int64), return_inverse=True)
    ends, alive = np.zeros((GROUPS, len(counts))), np.zeros((GROUPS, len(counts)))
    for column, count in enumerate(counts):
        profile_ends, profile_live = decode_profile(workload.response, int(count))
        size = len(profile_ends)
        ends[:size, column], ends[size:, column] = profile_ends, profile_ends[-1]
        alive[:size, column] = profile_live
    steps = np.diff(ends, axis=0, prepend=0.0)
    return steps[:, index], ends[:, index], alive[:, index]


def _sum(steps: Floats, seconds: Floats) -> Floats:
    return np.asarray((np.reshape(steps, (len(steps), -1)) * seconds).sum(axis=0))


def _added(one: Seconds, other: Seconds) -> dict[str, Floats]:
    zero = np.zeros(1)
    return {name: one.get(name, zero) + other.get(name, zero) for name in (*one, *(other.keys() - one.keys()))}
