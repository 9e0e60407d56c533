"""How many parameters a model has, by part and in closed form, so that nobody lists its tensors to count them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nereus.core import Head, ModelSpec
from nereus.cost.rows import Ints

TENSORS_PER_LAYER = 9
"""Of a dense layer with grouped attention. The embedding is one more, final norm and head are two."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Elements that the fullest tp rank stores of each part; with tp and ep 1 those of the whole model.

    Columns of one shape, or scalars. A layer is `attention` + `norms` and either `ffn` (dense) or `router` + `shared`
    + `experts` × `expert` (with experts). `experts` counts the routed experts one device holds.
    """

    attention: Ints
    norms: Ints
    ffn: Ints
    router: Ints
    shared: Ints
    expert: Ints
    experts: Ints
    embedding: Ints
    final_norm: Ints
    head: Ints
    dense_layers: int
    expert_layers: int
    experts_per_token: int

    @property
    def dense_layer(self) -> Ints:
        """One dense layer."""
        return self.attention + self.norms + self.ffn

    @property
    def outside_experts(self) -> Ints:
        """One layer with experts, but for its routed experts: what every token passes."""
        return self.attention + self.norms + self.router + self.shared

    @property
    def routed_experts(self) -> Ints:
        """The routed experts of one layer."""
        return self.experts * self.expert

    @property
    def first_rank(self) -> Ints:
        """What the first pp rank holds beside its layers."""
        return self.embedding

    @property
    def last_rank(self) -> Ints:
        """What the last pp rank holds beside its layers (a tied head is the embedding's second copy, not counted)."""
        return self.final_norm + self.head

    @property
    def total(self) -> Ints:
        """All layers, embedding and head, each once."""
        layers = self.dense_layers * self.dense_layer
        layers = layers + self.expert_layers * (self.outside_experts + self.routed_experts)
        return layers + self.first_rank + self.last_rank

    @property
    def active(self) -> Ints:
        """What one token passes: of the routed experts only the chosen ones. Meaningful with ep 1."""
        idle = (self.experts - self.experts_per_token) * self.expert
        return self.total - self.expert_layers * idle


def parameters(spec: ModelSpec, tp: ArrayLike = 1, ep: ArrayLike = 1) -> Parameters:
    """Parameters of a model, or of its fullest tp rank, cut `ep` ways by expert.

    Experts are whole on their rank where `ep` cuts them, else each is cut by `tp` along its width.
    """
    tp, ep = np.broadcast_arrays(np.asarray(tp, np.int64), np.asarray(ep, np.int64))
    none = np.zeros_like(tp)
    expert_layers = spec.layers - spec.dense_layers if spec.experts else 0
    expert_tp = expert_degree(tp, ep)
    vocab = _ceil(spec.vocab, tp)
    positions = spec.max_positions * spec.hidden if spec.learned_positions else 0
    norm = (2 if spec.layer_norm else 1) * spec.hidden
    head = np.full_like(tp, spec.hidden) if spec.head is Head.SCALAR else vocab * spec.hidden
    return Parameters(
        attention=_latent(spec, tp) if spec.kv_rank else _grouped(spec, tp),
        norms=none + (4 if spec.post_norms else 2) * norm,
        ffn=_feed_forward(spec, _ceil(spec.ffn_hidden, tp)),
        router=none + spec.experts * (spec.hidden + spec.biases),
        shared=_feed_forward(spec, _ceil(spec.shared_experts * spec.expert_hidden, tp))
        if spec.shared_experts
        else none,
        expert=_feed_forward(spec, _ceil(spec.expert_hidden, expert_tp)) if spec.experts else none,
        experts=_ceil(spec.experts, ep),
        embedding=vocab * spec.hidden + positions,
        final_norm=none + norm,
        head=none if spec.tied_embeddings else head,
        dense_layers=spec.layers - expert_layers,
        expert_layers=expert_layers,
        experts_per_token=spec.experts_per_token,
    )


def expert_degree(tp: Ints, ep: Ints) -> Ints:
    """Tensor-parallel degree inside one expert: the tp ranks are among those that `ep` hands whole experts to."""
    return np.where(ep > 1, 1, tp)


def _ceil(size: int, degree: Ints) -> Ints:
    return np.asarray(-(-size // degree))


def _grouped(spec: ModelSpec, tp: Ints) -> Ints:
    """Query, key, value and output projections; KV heads are replicated where there are fewer than tp ranks."""
    query = _ceil(spec.heads, tp) * spec.head_dim
    keys = _ceil(spec.kv_heads, tp) * spec.head_dim
    biases = (query + 2 * keys) * (spec.qkv_bias or spec.biases) + spec.hidden * spec.biases
    norms_and_sinks = 2 * spec.head_dim * spec.qk_norm + _ceil(spec.heads, tp) * spec.sinks
    return (2 * query + 2 * keys) * spec.hidden + biases + norms_and_sinks


def _latent(spec: ModelSpec, tp: Ints) -> Ints:
    """Multi-head latent attention: whole compressions with their norms, expansions and output cut by head."""
    heads, per_query = _ceil(spec.heads, tp), spec.head_dim + spec.rope_head_dim
    query_rank = spec.query_rank
    query = query_rank * (spec.hidden + 1 + heads * per_query) if query_rank else spec.hidden * heads * per_query
    keys = (spec.kv_rank + spec.rope_head_dim) * spec.hidden + spec.kv_rank
    expansion = spec.kv_rank * heads * (spec.head_dim + spec.value_head_dim)
    return np.asarray(query + keys + expansion + heads * spec.value_head_dim * spec.hidden)


def _feed_forward(spec: ModelSpec, width: Ints) -> Ints:
    rows = (2 if spec.gated else 1) * width
    return (rows + width) * spec.hidden + (rows + spec.hidden) * spec.biases
