"""Bytes of a model-stage on one device: what stays between calls and what a call adds, by named term (D7.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nereus.core import (
    DTYPE_BYTES,
    Candidate,
    Cut,
    DeviceKind,
    Head,
    Kind,
    Layout,
    ModelSpec,
    StateSchema,
    TensorSpec,
    Where,
    Work,
    Workload,
)
from nereus.cost.activations import EAGER_NORM_COPIES, Widths
from nereus.cost.lengths import decode_profile
from nereus.cost.operations import Shard
from nereus.cost.parameters import parameters
from nereus.cost.ranks import Ranks
from nereus.cost.rows import RECOMPUTE, Bools, Floats, Ints, Rows
from nereus.cost.state import dtypes

Terms = Mapping[str, Floats]

BLOCK_TOKENS = 16
"""A KV cache grows by so many tokens at a time."""
BUCKET_BYTES = 25 * 2**20
"""The flat buffer through which gradients are reduced over replicas."""
TRAIN_LOGITS_COPIES = 3
FORWARD_LOGITS_COPIES = 2
SAMPLING_COPIES = 2
"""Logits of the whole vocabulary in fp64 where tokens are chosen, and their cumulative sum."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one model-stage on one kind of device, by named term; columns, for one pp rank of every row.

    `resident` stays between calls, `transient` is what one kind of work adds at its peak, neither yet scaled by
    calibration. Both are those of the fullest tp rank. `rows` is as long as `ranks`, or a single row. What an
    offloaded model-stage stores counts during its own work; `stored` says how much that is.
    """

    spec: ModelSpec
    trained: bool
    workload: Workload
    kind: DeviceKind

    def stored(self, rows: Rows, ranks: Ranks) -> Terms:
        """Parameters and optimizer state, sharded over replicas as ZeRO does."""
        held, kinds = self._held(rows, ranks), dtypes(self.spec, self.trained)
        state_bytes = sum(DTYPE_BYTES[dtype] for kind, dtype in kinds.items() if kind is not Kind.PARAM)
        found = {"parameters": DTYPE_BYTES[kinds[Kind.PARAM]] * held.elements(rows.zero >= 3)}
        if self.trained:
            found["optimizer state"] = state_bytes * held.elements(rows.zero >= 1)
        return found

    def resident(self, rows: Rows, ranks: Ranks) -> Terms:
        """What stays between calls; nothing of an offloaded model-stage."""
        return {name: np.where(rows.offload, 0.0, size) for name, size in self.stored(rows, ranks).items()}

    def transient(self, rows: Rows, ranks: Ranks, work: Work) -> Terms:
        """What a call adds at its peak."""
        match work:
            case Work.GENERATE:
                found = self._generation(rows, ranks)
            case Work.FORWARD:
                found = self._forward(rows, ranks)
            case Work.UPDATE:
                found = self._update(rows, ranks)
        loaded = sum(self.stored(rows, ranks).values())
        return {**found, "loaded state": np.where(rows.offload, loaded, 0.0)}

    def kv_sequence_bytes(self, rows: Rows) -> Ints:
        """KV cache of one longest sequence on the device of a unit that holds most layers (the first pp rank)."""
        return np.maximum(1, _blocks(self._longest) * self._kv_token_bytes(rows, rows.layers_first))

    @property
    def _element_bytes(self) -> int:
        return DTYPE_BYTES[self.spec.dtype]

    @property
    def _longest(self) -> float:
        """Tokens of the longest sequence: memory must hold for it, not for the mean."""
        return self.workload.prompt.maximum + self.workload.response.maximum

    def _held(self, rows: Rows, ranks: Ranks) -> Held:
        return Held.of(self.spec, rows, ranks)

    def _widths(self, rows: Rows) -> Widths:
        return Widths.of(self.spec, rows, self.kind.constants.get("memory.norm_copies", EAGER_NORM_COPIES))

    def _layers(self, ranks: Ranks) -> tuple[Ints, Ints]:
        """Layers of a rank without and with experts."""
        return split_layers(self.spec, ranks)

    def _logits(self, rows: Rows, ranks: Ranks, tokens: Floats, copies: int) -> Floats:
        wide = max(self._element_bytes, DTYPE_BYTES["fp32"])
        width = 1 if self.spec.head is Head.SCALAR else -(-self.spec.vocab // rows.tp)
        return np.where(ranks.last, np.ceil(copies * tokens * width * wide), 0.0)

    def _kv_token_bytes(self, rows: Rows, layers: Ints) -> Ints:
        """KV cache of one token; latent attention caches one compressed vector on every tp rank."""
        keys = 2 * -(-self.spec.kv_heads // rows.tp) * self.spec.head_dim
        if self.spec.kv_rank:
            keys = np.full_like(rows.tp, self.spec.kv_rank + self.spec.rope_head_dim)
        return np.asarray(keys * layers * self._element_bytes)

    def _update(self, rows: Rows, ranks: Ranks) -> Terms:
        """Gradients stay for the whole update; beside them the backward pass, then the reduction over replicas."""
        mine = -(-self.workload.mini_batch // rows.dp)
        sequences = np.minimum(rows.micro_batch, mine)
        tokens = np.ceil(sequences * self._longest / rows.cp)
        widths, held = self._widths(rows), self._held(rows, ranks)
        gradient_bytes = master_bytes(dtypes(self.spec, True)) * held.elements(rows.zero >= 2)
        in_flight = micro_batches_in_flight(rows, ranks, -(-mine // sequences))
        elements = tokens * self._element_bytes
        full = rows.recompute == RECOMPUTE.index("full")
        dense, experts = self._layers(ranks)
        most = np.maximum(widths.kept(False) * (dense > 0), widths.kept(True) * (experts > 0))
        kept = dense * widths.kept(False) + experts * widths.kept(True)
        ends = np.where(ranks.last, widths.norm, 0.0)
        block = np.where(experts > 0, widths.expert_ffn, widths.ffn)
        backward = {
            "activations": elements * (in_flight * np.where(full, ranks.layers * widths.residual, kept) + ends),
            "recomputed layer": np.where(full, elements * most, 0.0),
            "working set": elements * (2 * widths.residual + 2 * block),
            "logits": self._logits(
                rows, ranks, sequences * self.workload.response.maximum / rows.cp, TRAIN_LOGITS_COPIES
            ),
        }
        bucket = np.where(rows.dp * rows.cp > 1, np.minimum(gradient_bytes, BUCKET_BYTES), 0.0)
        reducing = bucket > sum(backward.values())
        phases = {name: np.where(reducing, 0.0, size) for name, size in backward.items()}
        return {"gradients": gradient_bytes, **phases, "bucket": np.where(reducing, bucket, 0.0)}

    def _forward(self, rows: Rows, ranks: Ranks) -> Terms:
        sequences = np.minimum(rows.micro_batch, -(-self.workload.sequences // rows.dp))
        tokens = np.ceil(sequences * self._longest / rows.cp)
        logits = sequences * self.workload.response.maximum / rows.cp
        return {
            "working set": tokens * self._element_bytes * self._working(rows, ranks),
            "logits": self._logits(rows, ranks, logits, FORWARD_LOGITS_COPIES),
        }

    def _working(self, rows: Rows, ranks: Ranks) -> Floats:
        widths, (dense, experts) = self._widths(rows), self._layers(ranks)
        return np.maximum(widths.working(False) * (dense > 0), widths.working(True) * (experts > 0))

    def _generation(self, rows: Rows, ranks: Ranks) -> Terms:
        prompt = self.workload.prompt.maximum
        mine = -(-self.workload.sequences // rows.dp)
        mine = np.where(rows.kv_bytes > 0, np.minimum(mine, rows.micro_batch), mine)
        kv_bytes = np.ceil(self._kv_tokens(mine) * self._kv_token_bytes(rows, ranks.layers))
        copies = DTYPE_BYTES["fp64"] * SAMPLING_COPIES
        return {
            "kv cache": kv_bytes,
            # One layer's keys or values exist twice while their storage grows.
            "kv growth": np.ceil(kv_bytes / np.maximum(2 * ranks.layers, 1)),
            "prefill": np.ceil(mine * prompt) * self._element_bytes * self._working(rows, ranks),
            "logits": np.where(ranks.last, mine * float(self.spec.vocab * copies), 0.0),
        }

    def _kv_tokens(self, sequences: Ints) -> Floats:
        """Most tokens cached at once. Finished sequences leave: the largest product of those left and their tokens."""
        prompt, response = self.workload.prompt.maximum, self.workload.response
        if not response.quantiles:
            return np.asarray(sequences * float(_blocks(prompt + response.maximum)), dtype=np.float64)
        counts, where = np.unique(sequences, return_inverse=True)
        most = []
        for count in counts.tolist():
            ends, live = decode_profile(response, count)
            most.append(max(left * _blocks(prompt + end) for end, left in zip(ends, live, strict=True)))
        return np.array(most, dtype=np.float64)[where].reshape(np.shape(sequences))


@dataclass(frozen=True, slots=True)
class Held:
    """Parameter elements of one pp rank's fullest tp rank, and over how many devices ZeRO could shard them."""

    dense: Ints
    experts: Ints
    dense_replicas: Ints
    expert_replicas: Ints

    @classmethod
    def of(cls, spec: ModelSpec, rows: Rows, ranks: Ranks) -> Held:
        """Padding of the vocabulary and a tied head's second copy included."""
        part = parameters(spec, rows.tp, rows.ep)
        dense_layers, expert_layers = split_layers(spec, ranks)
        copy = -(-spec.vocab // rows.tp) * spec.hidden if spec.tied_embeddings else 0
        dense = dense_layers * part.dense_layer + expert_layers * part.outside_experts
        dense = dense + np.where(ranks.first, part.first_rank, 0)
        dense = dense + np.where(ranks.last, part.last_rank + np.where(ranks.first, 0, copy), 0)
        replicas = rows.dp * rows.cp
        expert_replicas = np.where(rows.ep > 1, np.maximum(replicas * rows.tp // rows.ep, 1), replicas)
        return cls(dense, expert_layers * part.routed_experts, replicas, expert_replicas)

    def elements(self, sharded: Bools) -> Floats:
        """Elements a device holds, where `sharded` only its share of them."""
        dense: Floats = np.ceil(self.dense / np.where(sharded, self.dense_replicas, 1))
        return dense + np.ceil(self.experts / np.where(sharded, self.expert_replicas, 1))


def split_layers(spec: ModelSpec, ranks: Ranks) -> tuple[Ints, Ints]:
    """Layers of a rank without and with experts; the dense ones lead."""
    if not spec.experts:
        return ranks.layers, np.zeros_like(ranks.layers)
    dense = np.clip(spec.dense_layers - ranks.before, 0, ranks.layers)
    return dense, ranks.layers - dense


def micro_batches_in_flight(rows: Rows, ranks: Ranks, count: Ints) -> Floats:
    """Micro-batches whose activations a pp rank holds at once under 1F1B, as many as there are at most.

    A rank starts as many before its first backward as ranks follow it, itself included; with `vpp` chunks a rank
    (interleaved) it starts more, of a chunk each.
    """
    after = rows.pp - ranks.index
    chunks = 2 * (after - 1) + (rows.vpp - 1) * rows.pp + 1
    return np.asarray(np.minimum(np.where(rows.vpp > 1, chunks / rows.vpp, after), count), dtype=float)


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


def master_bytes(kinds: StateSchema | Mapping[Kind, str]) -> int:
    """Bytes of one element of a gradient or moment."""
    kinds = kinds.dtypes if isinstance(kinds, StateSchema) else kinds
    return DTYPE_BYTES[kinds.get(Kind.EXP_AVG, kinds[Kind.PARAM])]


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
