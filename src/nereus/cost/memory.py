"""Bytes of a model-stage on one device: what stays between calls and what a call adds, by named term (D7.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nereus.core import DTYPE_BYTES, DeviceKind, Head, Kind, Layout, ModelSpec, Work, Workload
from nereus.cost.activations import EAGER_NORM_COPIES, Widths
from nereus.cost.held import Held, split_layers
from nereus.cost.lengths import decode_profile
from nereus.cost.ranks import Ranks
from nereus.cost.rows import RECOMPUTE, Floats, Ints, Rows
from nereus.cost.state import dtypes

Terms = Mapping[str, Floats]
"""Bytes by name of what they hold."""

BLOCK_TOKENS = 16
"""A KV cache grows by so many tokens at a time."""
BUCKET_BYTES = 25 * 2**20
"""The flat buffer through which gradients are reduced over replicas, where the device kind names no other."""
TRAIN_LOGITS_COPIES = 3
"""Wide logits of a micro-batch, their probabilities and their gradient: no fused or chunked loss is assumed."""
FORWARD_LOGITS_COPIES = 2
SAMPLING_COPIES = 2
"""Logits of the whole vocabulary in fp64 where tokens are chosen, and their cumulative sum."""
GATHERED_LAYERS = 2
"""Sharded parameters (ZeRO-3) of the layer at work and of the one fetched ahead exist whole."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one model-stage on one kind of device, by named term; columns, shaped as rows and ranks broadcast.

    `resident` stays between calls, `transient` is what one kind of work adds at its peak, neither yet scaled by
    calibration. Both are those of the fullest tp rank. What an offloaded model-stage stores counts during its own
    work; `stored` says how much that is. What every process has, whatever it runs, is in `runtime_bytes`.
    """

    spec: ModelSpec
    trained: bool
    workload: Workload
    kind: DeviceKind

    def stored(self, rows: Rows, ranks: Ranks) -> Terms:
        """Parameters and optimizer state, sharded over replicas as ZeRO does."""
        held, kinds = Held.of(self.spec, rows, ranks), dtypes(self.spec, self.trained)
        state_bytes = sum(DTYPE_BYTES[dtype] for kind, dtype in kinds.items() if kind is not Kind.PARAM)
        found = {"parameters": DTYPE_BYTES[kinds[Kind.PARAM]] * held.elements(rows.zero >= 3)}
        if self.trained:
            found["optimizer state"] = state_bytes * held.elements(rows.zero >= 1)
        return found

    def resident(self, rows: Rows, ranks: Ranks) -> Terms:
        """What stays between calls: of an offloaded model-stage its communicators alone."""
        found = {name: np.where(rows.offload, 0.0, size) for name, size in self.stored(rows, ranks).items()}
        communicator_bytes = self._constant("communicator.bytes", 0.0)
        if communicator_bytes:
            groups = sum((degree > 1).astype(float) for degree in (rows.tp, rows.pp, rows.dp, rows.cp, rows.ep))
            found["communicators"] = communicator_bytes * groups
        return found

    def transient(self, rows: Rows, ranks: Ranks, work: Work) -> Terms:
        """What a call adds at its peak."""
        match work:
            case Work.GENERATE:
                found = self._generation(rows, ranks)
            case Work.FORWARD:
                found = self._forward(rows, ranks)
            case Work.UPDATE:
                found = self._update(rows, ranks)
        if rows.offload.any():
            found["loaded state"] = np.where(rows.offload, sum(self.stored(rows, ranks).values()), 0.0)
        if (rows.zero >= 3).any():
            found["gathered layers"] = self._gathered(rows, ranks, work)
        return found

    def kv_sequence_bytes(self, rows: Rows) -> Ints:
        """KV cache of one longest sequence on the device of a unit that holds most layers (the first pp rank)."""
        return np.maximum(1, _blocks(self._longest) * kv_token_bytes(self.spec, rows.tp, rows.layers_first))

    @property
    def _longest(self) -> float:
        """Tokens of the longest sequence: memory must hold for it, not for the mean."""
        return self.workload.prompt.maximum + self.workload.response.maximum

    @property
    def _element_bytes(self) -> int:
        return DTYPE_BYTES[self.spec.dtype]

    @property
    def _wide_bytes(self) -> int:
        """Norms and losses are computed in at least fp32 (D5.9)."""
        return max(self._element_bytes, DTYPE_BYTES["fp32"])

    @property
    def _gradient_bytes(self) -> int:
        """Bytes of one element of a gradient, as wide as the moments."""
        return DTYPE_BYTES[dtypes(self.spec, trained=True)[Kind.EXP_AVG]]

    def _constant(self, name: str, start: float) -> float:
        return self.kind.constants.get(name, start)

    def _widths(self, rows: Rows) -> Widths:
        return Widths.of(self.spec, rows, self._constant("memory.norm_copies", EAGER_NORM_COPIES))

    def _update(self, rows: Rows, ranks: Ranks) -> dict[str, Floats]:
        """Gradients stay for the whole update; beside them the backward pass, then the reduction over replicas."""
        mine = -(-self.workload.mini_batch // rows.dp)
        sequences = np.minimum(rows.micro_batch, mine)
        tokens = np.ceil(sequences * self._longest / rows.cp)
        in_flight = micro_batches_in_flight(rows, ranks, mine / sequences)
        gradients = self._gradient_bytes * Held.of(self.spec, rows, ranks).elements(rows.zero >= 2)
        backward = self._backward(rows, ranks, tokens, in_flight)
        backward["logits"] = self._logits(rows, ranks, sequences, TRAIN_LOGITS_COPIES)
        largest = self._constant("dp.bucket_bytes", BUCKET_BYTES)
        bucket = np.where(rows.dp * rows.cp > 1, np.minimum(gradients, largest), 0.0)
        reducing = bucket > sum(backward.values())
        phase = {name: np.where(reducing, 0.0, size) for name, size in backward.items()}
        return {"gradients": gradients, **phase, "bucket": np.where(reducing, bucket, 0.0)}

    def _backward(self, rows: Rows, ranks: Ranks, tokens: Floats, in_flight: Floats) -> dict[str, Floats]:
        """Activations saved for the backward pass, and what it needs beside them inside one layer.

        With flash attention nothing of its inside is saved, so that selective recomputation frees nothing.
        """
        widths, (dense, experts) = self._widths(rows), split_layers(self.spec, ranks)
        plain, routed = widths.kept(experts=False), widths.kept(experts=True)
        full = rows.recompute == RECOMPUTE.index("full")
        kept = np.where(full, ranks.layers * widths.residual, dense * plain + experts * routed)
        largest = np.maximum(plain * (dense > 0), routed * (experts > 0))
        block = np.maximum(widths.ffn * (dense > 0), widths.expert_ffn * (experts > 0))
        elements = tokens * self._element_bytes
        return {
            "activations": elements * (in_flight * kept + np.where(ranks.last, widths.norm, 0.0)),
            "recomputed layer": np.where(full, elements * largest, 0.0),
            "working set": elements * (2 * self.spec.hidden + 2 * block),
        }

    def _forward(self, rows: Rows, ranks: Ranks) -> dict[str, Floats]:
        sequences = np.minimum(rows.micro_batch, -(-self.workload.sequences // rows.dp))
        tokens = np.ceil(sequences * self._longest / rows.cp)
        return {
            "working set": tokens * self._element_bytes * self._working(rows, ranks),
            "logits": self._logits(rows, ranks, sequences, FORWARD_LOGITS_COPIES),
        }

    def _working(self, rows: Rows, ranks: Ranks) -> Floats:
        """Elements a token alive at once inside the largest layer of a rank, without autograd."""
        widths, (dense, experts) = self._widths(rows), split_layers(self.spec, ranks)
        return np.maximum(widths.working(experts=False) * (dense > 0), widths.working(experts=True) * (experts > 0))

    def _logits(self, rows: Rows, ranks: Ranks, sequences: Ints, copies: int) -> Floats:
        """Of the response tokens of a micro-batch; a scalar head has one a token."""
        tokens = sequences * self.workload.response.maximum / rows.cp
        width = 1 if self.spec.head is Head.SCALAR else -(-self.spec.vocab // rows.tp)
        return np.where(ranks.last, np.ceil(copies * tokens * width * self._wide_bytes), 0.0)

    def _gathered(self, rows: Rows, ranks: Ranks, work: Work) -> Floats:
        """Whole parameters of the layers at work, and whole gradients of one before they are scattered."""
        layer = Held.of(self.spec, rows, ranks).layer
        width = GATHERED_LAYERS * self._element_bytes + (work is Work.UPDATE) * self._element_bytes
        return np.where(rows.zero >= 3, float(width) * layer, 0.0)

    def _generation(self, rows: Rows, ranks: Ranks) -> dict[str, Floats]:
        """The cache of as many sequences as run at once, beside their prompts' prefill and the choice of a token."""
        prompt = self.workload.prompt.maximum
        mine = -(-self.workload.sequences // rows.dp)
        mine = np.where(rows.kv_bytes > 0, np.minimum(mine, rows.micro_batch), mine)
        # A budget is reserved whole, in equal parts for the layers.
        reserved = rows.kv_bytes * ranks.layers / np.maximum(rows.layers_first, 1)
        needed = self._kv_tokens(mine) * kv_token_bytes(self.spec, rows.tp, ranks.layers)
        cache = np.ceil(np.maximum(needed, reserved))
        prefilled = np.minimum(np.ceil(mine * prompt), self._constant("prefill.tokens", math.inf))
        found = {
            "kv cache": cache,
            # One layer's keys or values exist twice while their storage grows.
            "kv growth": np.ceil(cache / np.maximum(2 * ranks.layers, 1)),
            "prefill": prefilled * self._element_bytes * self._working(rows, ranks),
            "logits": np.where(ranks.last, mine * float(self.spec.vocab * DTYPE_BYTES["fp64"] * SAMPLING_COPIES), 0.0),
        }
        graphs_bytes = self._constant("graphs.bytes", 0.0)
        return {**found, "graphs": np.full(np.shape(cache), graphs_bytes)} if graphs_bytes else found

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


def runtime_bytes(kind: DeviceKind) -> int:
    """Bytes of a device that no model-stage gets: the runtime's context and the workspaces of matrix products."""
    return math.ceil(kind.constants.get("context.bytes", 0.0) + kind.constants.get("workspace.bytes", 0.0))


def share(work: Work, workload: Workload, dp: int) -> int:
    """Sequences of the largest share: of a mini-batch for an update, of the whole batch otherwise (D5.8)."""
    whole = workload.mini_batch if work is Work.UPDATE else workload.sequences
    return -(-whole // dp)


def sequence_kv_bytes(spec: ModelSpec, layout: Layout, workload: Workload) -> int:
    """KV cache of one longest sequence on the device of a unit that holds most layers."""
    tokens = _blocks(workload.prompt.maximum + workload.response.maximum)
    layers = len(layout.layers_of(0, spec.layers))
    return max(1, int(tokens * kv_token_bytes(spec, np.array(layout.tp), np.array(layers))))


def kv_token_bytes(spec: ModelSpec, tp: Ints, layers: Ints) -> Ints:
    """KV cache of one token; latent attention caches one compressed vector, whole on every tp rank."""
    keys = 2 * -(-spec.kv_heads // tp) * spec.head_dim
    if spec.kv_rank:
        keys = np.full_like(tp, spec.kv_rank + spec.rope_head_dim)
    return np.asarray(keys * layers * DTYPE_BYTES[spec.dtype])


def micro_batches_in_flight(rows: Rows, ranks: Ranks, count: Floats) -> Floats:
    """Micro-batches whose activations a pp rank holds at once under 1F1B; `count` are all, a partial one in part.

    A rank starts as many before its first backward as ranks follow it, itself included; with `vpp` chunks a rank
    (interleaved) it starts more, of a chunk each.
    """
    after = rows.pp - ranks.index
    chunks = 2 * (after - 1) + (rows.vpp - 1) * rows.pp + 1
    return np.asarray(np.minimum(np.where(rows.vpp > 1, chunks / rows.vpp, after), count), dtype=np.float64)


def _blocks(tokens: float) -> int:
    return -(-math.ceil(tokens) // BLOCK_TOKENS) * BLOCK_TOKENS
