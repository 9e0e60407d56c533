"""Bytes of a model-stage on one device: what stays between calls and what a call adds, by named term (D7.1)."""

from __future__ import annotations

import math

from nereus.core import (
    DTYPE_BYTES,
    Candidate,
    Cut,
    Kind,
    Layout,
    ModelSpec,
    StateSchema,
    TensorSpec,
    Where,
    Work,
    Workload,
)
from nereus.cost.lengths import decode_profile
from nereus.cost.operations import Shard

BLOCK_TOKENS = 16
"""A KV cache grows by so many tokens at a time."""
BUCKET_BYTES = 25 * 2**20
"""The flat buffer through which gradients are reduced over replicas."""
TRAIN_LOGITS_COPIES = 3
FORWARD_LOGITS_COPIES = 2
SAMPLING_COPIES = 2
"""Logits of the whole vocabulary in fp64 where tokens are chosen, and their cumulative sum."""


class Sizes:
    """Parameter elements of a model-stage by position; tensors that are cut alike are counted together."""

    def __init__(self, schema: StateSchema) -> None:
        self.schema = schema
        self._alike: dict[tuple[tuple[int, ...], Cut, Where], list[TensorSpec]] = {}
        for tensor in schema.tensors:
            self._alike.setdefault((tensor.shape, tensor.cut, tensor.where), []).append(tensor)
        self._known: dict[tuple[Layout, int, int], int] = {}

    def elements(self, layout: Layout, pp_rank: int, tp_rank: int) -> int:
        """Elements stored at a position, padding included."""
        key = (layout, pp_rank, tp_rank)
        if key not in self._known:
            layers = layout.layers_of(pp_rank, self.schema.layers)
            self._known[key] = sum(
                math.prod(alike[0].local_shape(layout.tp, tp_rank))
                * sum(
                    layout.holds(tensor, pp_rank, self.schema.layers)
                    if tensor.layer is None
                    else tensor.layer in layers
                    for tensor in alike
                )
                for alike in self._alike.values()
            )
        return self._known[key]


def resident_bytes(schema: StateSchema, candidate: Candidate, pp_rank: int, tp_rank: int) -> int:
    """What a position stores between calls: every kind of every tensor it holds."""
    return Sizes(schema).elements(candidate.layout, pp_rank, tp_rank) * schema.element_bytes


def master_bytes(schema: StateSchema) -> int:
    """Bytes of one element of a gradient or moment."""
    return DTYPE_BYTES[schema.dtypes.get(Kind.EXP_AVG, schema.dtypes[Kind.PARAM])]


def share(work: Work, workload: Workload, dp: int) -> int:
    """Sequences of the largest share: of a mini-batch for an update, of the whole batch otherwise (D5.8)."""
    whole = workload.mini_batch if work is Work.UPDATE else workload.sequences
    return -(-whole // dp)


def transient_bytes(
    spec: ModelSpec,
    candidate: Candidate,
    workload: Workload,
    work: Work,
    pp_rank: int,
    gradient_bytes: int = 0,
) -> dict[str, int]:
    """What a call adds at its peak, by term, on the most loaded tp rank of `pp_rank`; not yet scaled by calibration.

    `gradient_bytes` are the gradients of all local parameters, held during an update only.
    """
    shard = Shard.of(spec, candidate.layout, pp_rank)
    match work:
        case Work.GENERATE:
            return _generation(shard, spec, candidate, workload)
        case Work.FORWARD:
            return _forward(shard, candidate, workload)
        case Work.UPDATE:
            return _update(shard, candidate, workload, pp_rank, gradient_bytes)


def saved_elements(shard: Shard, recompute: str) -> tuple[int, int]:
    """Elements a token: (kept per layer until its backward, recomputed for one layer at a time).

    What autograd saves of a plain decoder layer: of each norm its input and normalised state, wide, and its output;
    query, keys, values and the attention output; gate, its activation, up, and their product. Counted on PyTorch 2.13
    (fp32, bf16, with and without grouped queries) this is within 4 %.
    """
    wide = shard.wide_bytes // shard.element_bytes
    attention = 2 * (shard.query + shard.keys) * (1 + wide * shard.qk_norm)
    everything = 2 * shard.norm_elements + attention + 4 * shard.ffn
    if recompute == "full":
        return shard.hidden, everything
    if recompute == "selective":
        return everything - attention, attention
    return everything, 0


def sequence_kv_bytes(spec: ModelSpec, layout: Layout, workload: Workload) -> int:
    """KV cache of one longest sequence on the device of a unit that holds most layers."""
    shard = Shard.of(spec, layout, 0)
    return max(1, _blocks(_longest(workload)[0]) * shard.kv_token_bytes)


def _longest(workload: Workload) -> tuple[float, float]:
    """Tokens of the longest sequence and of its response: memory must hold for it, not for the mean."""
    return workload.prompt.maximum + workload.response.maximum, workload.response.maximum


def _blocks(tokens: float) -> int:
    return -(-math.ceil(tokens) // BLOCK_TOKENS) * BLOCK_TOKENS


def _working_elements(shard: Shard) -> int:
    """Elements a token alive at once inside one layer without autograd: the larger of attention and feed-forward."""
    attention = 2 * shard.query + 4 * shard.keys + shard.query
    return 3 * shard.hidden + max(attention, 3 * shard.ffn)


def _logits_bytes(shard: Shard, tokens: float, copies: int) -> int:
    if not shard.last:
        return 0
    return math.ceil(copies * tokens * (1 if shard.scalar_head else shard.vocab) * shard.wide_bytes)


def _update(
    shard: Shard, candidate: Candidate, workload: Workload, pp_rank: int, gradient_bytes: int
) -> dict[str, int]:
    """Gradients stay for the whole update; beside them first the backward pass, then the reduction over replicas."""
    length, response = _longest(workload)
    rows = share(Work.UPDATE, workload, candidate.dp)
    sequences = min(candidate.micro_batch, rows)
    # 1F1B: a pp rank starts as many micro-batches before its first backward as ranks follow it, itself included.
    in_flight = min(candidate.layout.pp - pp_rank, -(-rows // sequences))
    tokens = math.ceil(sequences * length)
    kept, recomputed = saved_elements(shard, candidate.recompute)
    ends = shard.norm_elements if shard.last else 0
    backward = {
        "activations": tokens * shard.element_bytes * (in_flight * shard.layers * kept + ends),
        "recomputed layer": tokens * shard.element_bytes * recomputed,
        "working set": tokens * shard.element_bytes * (2 * shard.hidden + 2 * shard.ffn),
        "logits": _logits_bytes(shard, sequences * response, TRAIN_LOGITS_COPIES),
    }
    reduction = {"bucket": min(gradient_bytes, BUCKET_BYTES) if candidate.dp > 1 else 0}
    phase = max(backward, reduction, key=lambda terms: sum(terms.values()))
    return {"gradients": gradient_bytes, **phase}


def _forward(shard: Shard, candidate: Candidate, workload: Workload) -> dict[str, int]:
    length, response = _longest(workload)
    sequences = min(candidate.micro_batch, share(Work.FORWARD, workload, candidate.dp))
    tokens = math.ceil(sequences * length)
    return {
        "working set": tokens * shard.element_bytes * _working_elements(shard),
        "logits": _logits_bytes(shard, sequences * response, FORWARD_LOGITS_COPIES),
    }


def _generation(shard: Shard, spec: ModelSpec, candidate: Candidate, workload: Workload) -> dict[str, int]:
    prompt = workload.prompt.maximum
    rows = share(Work.GENERATE, workload, candidate.dp)
    if candidate.kv_bytes > 0:
        rows = min(rows, candidate.micro_batch)
    kv_tokens = float(rows * _blocks(prompt + workload.response.maximum))
    if workload.response.quantiles:
        # Finished sequences leave: the peak is the largest product of sequences left and tokens so far.
        ends, live = decode_profile(workload.response, rows)
        kv_tokens = max(count * _blocks(prompt + end) for end, count in zip(ends, live, strict=True))
    kv_bytes = math.ceil(kv_tokens * shard.kv_token_bytes)
    whole_vocab = rows * spec.vocab * DTYPE_BYTES["fp64"] * SAMPLING_COPIES if shard.last else 0
    return {
        "kv cache": kv_bytes,
        # One layer's keys or values exist twice while their storage grows.
        "kv growth": -(-kv_bytes // max(2 * shard.layers, 1)),
        "prefill": math.ceil(rows * prompt) * shard.element_bytes * _working_elements(shard),
        "logits": whole_vocab,
    }
