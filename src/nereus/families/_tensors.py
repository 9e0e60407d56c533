"""The tensors of a decoder from its sizes: names as in Llama, shapes, and how TP, PP and EP cut each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nereus.core import Cut, Head, ModelSpec, TensorSpec, Where
from nereus.families import EMBED, LM_HEAD, NORM, POSITIONS, SCORE

WHOLE = Cut()

Make = Callable[..., TensorSpec]
"""Makes one tensor of a layer from its name in the layer, its shape and how it is cut."""


def tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Every tensor of a decoder in model order. The experts of a layer are stacked in dim 0."""
    vocabulary = Cut(0, spec.vocab, padded=True)
    table = (spec.vocab, spec.hidden)
    found = [TensorSpec(EMBED, table, Where.BOTH_ENDS if spec.tied_embeddings else Where.FIRST, cut=vocabulary)]
    if spec.learned_positions:
        found.append(TensorSpec(POSITIONS, (spec.max_positions, spec.hidden), Where.FIRST))
    for layer in range(spec.layers):
        found += _layer(spec, layer)
    found.append(TensorSpec(NORM, (spec.hidden,), Where.LAST))
    if spec.layer_norm:
        found.append(TensorSpec(NORM.replace("weight", "bias"), (spec.hidden,), Where.LAST))
    if spec.head is Head.SCALAR:
        found.append(TensorSpec(SCORE, (1, spec.hidden), Where.LAST))
    elif not spec.tied_embeddings:
        found.append(TensorSpec(LM_HEAD, table, Where.LAST, cut=vocabulary))
    return tuple(found)


def legal_tp(spec: ModelSpec) -> tuple[int, ...]:
    """Degrees that give every rank as many query heads, with whole KV heads kept or replicated evenly."""
    widest = min(spec.ffn_hidden, spec.expert_hidden) if spec.experts else spec.ffn_hidden
    return tuple(
        tp
        for tp in range(1, spec.heads + 1)
        if spec.heads % tp == 0 and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0) and tp <= widest
    )


def _layer(spec: ModelSpec, layer: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer}."

    def make(
        name: str, shape: tuple[int, ...], cut: Cut = WHOLE, partial: bool = False, experts: int = 0
    ) -> TensorSpec:
        return TensorSpec(prefix + name, shape, Where.LAYER, layer, cut, partial, experts)

    yield from _norm(spec, make, "input_layernorm")
    yield from _latent(spec, make) if spec.kv_rank else _grouped(spec, make)
    yield from _norm(spec, make, "post_attention_layernorm")
    if spec.post_norms:
        yield from _norm(spec, make, "pre_feedforward_layernorm")
        yield from _norm(spec, make, "post_feedforward_layernorm")
    if spec.experts and layer >= spec.dense_layers:
        yield from _experts(spec, make)
    else:
        yield from _feed_forward(spec, make, "mlp", spec.ffn_hidden)


def _norm(spec: ModelSpec, make: Make, name: str) -> Iterator[TensorSpec]:
    yield make(f"{name}.weight", (spec.hidden,))
    if spec.layer_norm:
        yield make(f"{name}.bias", (spec.hidden,))


def _grouped(spec: ModelSpec, make: Make) -> Iterator[TensorSpec]:
    """Attention in which groups of query heads share a key and value head."""
    query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    heads, kv_heads = Cut(0, spec.heads), Cut(0, spec.kv_heads, replicated=True)
    for name, size, cut in (("q_proj", query, heads), ("k_proj", keys, kv_heads), ("v_proj", keys, kv_heads)):
        yield make(f"self_attn.{name}.weight", (size, spec.hidden), cut)
        if spec.qkv_bias or spec.biases:
            yield make(f"self_attn.{name}.bias", (size,), cut)
    if spec.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield make(f"self_attn.{name}.weight", (spec.head_dim,), partial=True)
    if spec.sinks:
        yield make("self_attn.sinks", (spec.heads,), heads)
    yield make("self_attn.o_proj.weight", (spec.hidden, query), Cut(1, spec.heads))
    if spec.biases:
        yield make("self_attn.o_proj.bias", (spec.hidden,))


def _latent(spec: ModelSpec, make: Make) -> Iterator[TensorSpec]:
    """Attention whose queries, keys and values are expanded, head by head, from small vectors every rank computes."""
    heads, per_query = Cut(0, spec.heads), spec.head_dim + spec.rope_head_dim
    query = spec.heads * per_query
    if spec.query_rank:
        yield make("self_attn.q_a_proj.weight", (spec.query_rank, spec.hidden))
        yield make("self_attn.q_a_layernorm.weight", (spec.query_rank,))
        yield make("self_attn.q_b_proj.weight", (query, spec.query_rank), heads)
    else:
        yield make("self_attn.q_proj.weight", (query, spec.hidden), heads)
    yield make("self_attn.kv_a_proj_with_mqa.weight", (spec.kv_rank + spec.rope_head_dim, spec.hidden))
    yield make("self_attn.kv_a_layernorm.weight", (spec.kv_rank,))
    expanded = spec.heads * (spec.head_dim + spec.value_head_dim)
    yield make("self_attn.kv_b_proj.weight", (expanded, spec.kv_rank), heads)
    yield make("self_attn.o_proj.weight", (spec.hidden, spec.heads * spec.value_head_dim), Cut(1, spec.heads))


def _feed_forward(spec: ModelSpec, make: Make, prefix: str, width: int) -> Iterator[TensorSpec]:
    for name in ("gate_proj", "up_proj") if spec.gated else ("up_proj",):
        yield make(f"{prefix}.{name}.weight", (width, spec.hidden), Cut(0, width))
        if spec.biases:
            yield make(f"{prefix}.{name}.bias", (width,), Cut(0, width))
    yield make(f"{prefix}.down_proj.weight", (spec.hidden, width), Cut(1, width))
    if spec.biases:
        yield make(f"{prefix}.down_proj.bias", (spec.hidden,))


def _experts(spec: ModelSpec, make: Make) -> Iterator[TensorSpec]:
    """Router, shared experts as one wide block, and the routed experts stacked."""
    count, width = spec.experts, spec.expert_hidden
    yield make("mlp.gate.weight", (count, spec.hidden))
    if spec.biases:
        yield make("mlp.gate.bias", (count,))
    if spec.shared_experts:
        yield from _feed_forward(spec, make, "mlp.shared_experts", spec.shared_experts * width)
    for name in ("gate_proj", "up_proj") if spec.gated else ("up_proj",):
        yield make(f"mlp.experts.{name}.weight", (count, width, spec.hidden), Cut(1, width), experts=count)
        if spec.biases:
            yield make(f"mlp.experts.{name}.bias", (count, width), Cut(1, width), experts=count)
    yield make("mlp.experts.down_proj.weight", (count, spec.hidden, width), Cut(2, width), experts=count)
    if spec.biases:
        yield make("mlp.experts.down_proj.bias", (count, spec.hidden), experts=count)
