"""Bytes of a model-stage on one device: what stays between calls and what a call adds, by named term (D7.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from nereus.core import DTYPE_BYTES, DeviceKind, Head, Kind, Layout, ModelSpec, Work, Workload
from nereus.core.plan import RECOMPUTE
from nereus.cost.activations import Widths
from nereus.cost.cache import kv_token_bytes
from nereus.cost.constants import of_kind
from nereus.cost.held import Held, split_layers
from nereus.cost.lengths import moments, segments
from nereus.cost.ranks import Ranks
from nereus.cost.rows import Floats, Ints, Rows, distinct
from nereus.cost.state import dtypes
from nereus.cost.windows import cached_tokens

Terms = Mapping[str, Floats]
"""Bytes by name of what they hold."""

BLOCK_TOKENS = 16
"""A KV cache grows by so many tokens at a time."""
UPDATE_LOGITS = {
    "eager": (3, 0),
    "vocab_parallel": (1, 1),
    "in_place": (0, 1),
    "in_place_chunked": (0, 1),
    "fused": (0, 0),
}
"""Copies of a micro-batch's logits in fp32 and in the model's dtype by `Workload.loss`.

Eager: logits, probabilities and gradient. Vocabulary-parallel: one buffer is logits, exponentials and gradient in turn,
the gradient is cast (megatron/core/tensor_parallel/cross_entropy.py). In place: the gradient takes the place of logits
that were never cast (flash_attn's triton cross_entropy_loss). Fused: chunks of tokens (verl's FusedLinearForPPO)."""
FORWARD_LOGITS = {
    "eager": (2, 0),
    "vocab_parallel": (3, 0),
    "in_place": (0, 3),
    "in_place_chunked": (0, 2),
    "fused": (0, 0),
}
"""The same without gradients, but with the entropy that log-probabilities are asked for with (verl): a copy of the
logits beside their exponentials; probabilities and their product with logits, or those of 2,048 tokens at a time."""
SAMPLING_COPIES = 2
"""Logits of the whole vocabulary in fp64 where tokens are chosen, and their cumulative sum."""
PACKED_DEVIATIONS = 3
"""A packed micro-batch is longer than its mean by at most so many standard deviations."""
GATHERED_LAYERS = 2
"""Sharded parameters (ZeRO-3) of the layer at work and of the one fetched ahead exist whole."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one model-stage on one kind of device. What every process has besides is in `runtime_bytes`."""

    spec: ModelSpec
    trained: bool
    workload: Workload
    kind: DeviceKind

    def at(self, rows: Rows, ranks: Ranks) -> Load:
        """Its bytes on some pp ranks of some rows. Columns are shaped as both broadcast."""
        copies = of_kind(self.kind, "memory.norm_copies")
        dense, experts = split_layers(self.spec, ranks)
        widths = Widths.of(self.spec, rows, copies)
        return Load(self, rows, ranks, Held.of(self.spec, rows, ranks), widths, dense, experts)

    def stored(self, rows: Rows, ranks: Ranks) -> Terms:
        """Parameters and optimizer state, wherever they are between calls."""
        return self.at(rows, ranks).stored

    def resident(self, rows: Rows, ranks: Ranks) -> Terms:
        """What stays on the device between calls."""
        return self.at(rows, ranks).resident

    def transient(self, rows: Rows, ranks: Ranks, work: Work) -> Terms:
        """What a call adds at its peak."""
        return self.at(rows, ranks).transient(work)

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence: memory must hold for it, not for the mean."""
        return self.workload.prompt.maximum + self.workload.response.maximum

    def tokens(self, sequences: Ints) -> tuple[Floats, Floats]:
        """(all, with logits) of a micro-batch. Padded: every sequence as long as the longest, logits of responses.

        Packed: what all but a few micro-batches in a thousand stay under, logits of every token; the longest must fit.
        """
        prompt, response = self.workload.prompt, self.workload.response
        if not self.workload.packed:
            padded = sequences.astype(np.float64)
            return padded * self.longest, padded * response.maximum
        means, variances = zip(moments(prompt), moments(response), strict=True)
        likely = sequences * sum(means) + PACKED_DEVIATIONS * np.sqrt(sequences * sum(variances))
        tokens: Floats = np.clip(likely, self.longest, sequences * self.longest)
        return tokens, tokens

    @property
    def element_bytes(self) -> int:
        """Bytes of one parameter or activation."""
        return DTYPE_BYTES[self.spec.dtype]

    @property
    def wide_bytes(self) -> int:
        """Norms and losses are computed in at least fp32 (D5.9)."""
        return max(self.element_bytes, DTYPE_BYTES["fp32"])

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one element of a gradient, as wide as the moments."""
        return DTYPE_BYTES[dtypes(self.spec, trained=True)[Kind.EXP_AVG]]


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes of a model-stage on pp ranks of rows, by named term, not yet scaled by calibration.

    Those of the fullest tp rank. What an offloaded model-stage stores counts during its own work alone.
    """

    memory: Memory
    rows: Rows
    ranks: Ranks
    held: Held
    widths: Widths
    dense: Ints
    experts: Ints

    @property
    def stored(self) -> dict[str, Floats]:
        """Parameters and optimizer state, sharded over replicas as ZeRO does."""
        kinds, zero = dtypes(self.memory.spec, self.memory.trained), self.rows.zero
        state_bytes = sum(DTYPE_BYTES[dtype] for kind, dtype in kinds.items() if kind is not Kind.PARAM)
        found: dict[str, Floats] = {"parameters": DTYPE_BYTES[kinds[Kind.PARAM]] * self.held.elements(zero >= 3)}
        if self.memory.trained:
            found["optimizer state"] = state_bytes * self.held.elements(zero >= 1)
        return found

    @property
    def resident(self) -> Terms:
        """What stays between calls: of an offloaded model-stage its communicators alone, one for each kind of group."""
        rows, found = self.rows, dict[str, Floats](self.stored)
        if rows.offload.any():
            found = {name: np.where(rows.offload, 0.0, size) for name, size in found.items()}
        communicator_bytes = self._constant("communicator.bytes")
        if communicator_bytes:
            degrees = np.array([rows.tp, rows.pp, rows.dp, rows.cp, rows.ep])
            found["communicators"] = communicator_bytes * (degrees > 1).sum(axis=0)
        return found

    def transient(self, work: Work) -> Terms:
        """What one kind of work adds at its peak."""
        match work:
            case Work.GENERATE:
                found = self._generation()
            case Work.FORWARD:
                found = self._forward()
            case Work.UPDATE:
                found = self._update()
        if self.rows.offload.any():
            needed = self.stored.values() if work is Work.UPDATE else [self.stored["parameters"]]
            found["loaded state"] = np.where(self.rows.offload, sum(needed), 0.0)
        if (self.rows.zero >= 3).any():
            found["gathered layers"] = self._gathered(work)
        return found

    def _constant(self, name: str) -> float:
        return of_kind(self.memory.kind, name)

    def _update(self) -> dict[str, Floats]:
        """Gradients stay for the whole update; beside them the backward pass, then the reduction over replicas."""
        rows = self.rows
        mine = -(-self.memory.workload.mini_batch // rows.dp)
        sequences = np.minimum(rows.micro_batch, mine)
        in_flight = micro_batches_in_flight(rows, self.ranks, mine / sequences)
        gradients = self.memory.gradient_bytes * self.held.elements(rows.zero >= 2)
        tokens, with_logits = self.memory.tokens(sequences)
        backward = self._backward(np.ceil(tokens / rows.cp), in_flight)
        backward["logits"] = self._logits(with_logits / rows.cp, UPDATE_LOGITS)
        largest = self._constant("dp.bucket_bytes")
        bucket = np.where(rows.dp * rows.cp > 1, np.minimum(gradients, largest), 0.0)
        reducing = bucket > sum(backward.values())
        phase = {name: np.where(reducing, 0.0, size) for name, size in backward.items()}
        return {"gradients": gradients, **phase, "bucket": np.where(reducing, bucket, 0.0)}

    def _backward(self, tokens: Floats, in_flight: Floats) -> dict[str, Floats]:
        """Activations saved for the backward pass, and what it needs beside them inside one layer.

        With flash attention nothing of its inside is saved, so that selective recomputation frees nothing.
        """
        widths, elements = self.widths, tokens * self.memory.element_bytes
        layers = (widths.kept(experts=False), widths.kept(experts=True))
        kept, largest = self._added(*layers), self._largest(*layers)
        full = self.rows.recompute == RECOMPUTE.index("full")
        kept = np.where(full, self.ranks.layers * widths.residual, kept)
        block = self._largest(widths.ffn, widths.expert_ffn)
        return {
            "activations": elements * (in_flight * kept + np.where(self.ranks.last, widths.norm, 0.0)),
            "recomputed layer": np.where(full, elements * largest, 0.0),
            "working set": elements * (2 * self.memory.spec.hidden + 2 * block),
        }

    def _added(self, plain: Floats, routed: Floats) -> Floats:
        """All layers of a rank, of `plain` elements without experts and `routed` with."""
        if not self.memory.spec.experts:
            return self.ranks.layers * plain
        return self.dense * plain + self.experts * routed

    def _largest(self, plain: Floats, routed: Floats) -> Floats:
        """The larger kind of layer that a rank has; any for one without layers."""
        if not self.memory.spec.experts:
            return plain
        return np.maximum(plain * (self.dense > 0), routed * (self.experts > 0))

    def _forward(self) -> dict[str, Floats]:
        sequences = np.minimum(self.rows.micro_batch, -(-self.memory.workload.sequences // self.rows.dp))
        tokens, with_logits = self.memory.tokens(sequences)
        return {
            "working set": np.ceil(tokens / self.rows.cp) * self.memory.element_bytes * self._working(),
            "logits": self._logits(with_logits / self.rows.cp, FORWARD_LOGITS),
        }

    def _working(self) -> Floats:
        """Elements a token alive at once inside the largest layer of a rank, without autograd."""
        return self._largest(self.widths.working(experts=False), self.widths.working(experts=True))

    def _logits(self, tokens: Floats, copies: Mapping[str, tuple[int, int]]) -> Floats:
        """Of the tokens of a micro-batch that have any; a scalar head has one a token."""
        spec, (wide, own) = self.memory.spec, copies[self.memory.workload.loss]
        token_bytes = wide * self.memory.wide_bytes + own * self.memory.element_bytes
        width = 1 if spec.head is Head.SCALAR else -(-spec.vocab // self.rows.tp)
        return np.where(self.ranks.last, np.ceil(tokens * width * token_bytes), 0.0)

    def _gathered(self, work: Work) -> Floats:
        """Whole parameters of the layers at work, and whole gradients of one before they are scattered."""
        width = (GATHERED_LAYERS + (work is Work.UPDATE)) * self.memory.element_bytes
        return np.where(self.rows.zero >= 3, float(width) * self.held.layer, 0.0)

    def _generation(self) -> dict[str, Floats]:
        """The cache of as many sequences as run at once, beside their prompts' prefill and the choice of a token."""
        rows, ranks, spec, prompt = self.rows, self.ranks, self.memory.spec, self.memory.workload.prompt.maximum
        mine = -(-self.memory.workload.sequences // rows.dp)
        mine = np.where(rows.kv_bytes > 0, np.minimum(mine, rows.micro_batch), mine)
        # A budget is reserved whole, in equal parts for the layers.
        reserved = rows.kv_bytes * ranks.layers / np.maximum(rows.layers_first, 1)
        needed = self._kv_tokens(mine) * kv_token_bytes(spec, rows.tp, ranks.layers, self.memory.kind.constants)
        cache = np.ceil(np.maximum(needed, reserved))
        prefilled = np.minimum(np.ceil(mine * prompt), self._constant("prefill.tokens"))
        found = {
            "kv cache": cache,
            # One layer's keys or values exist twice while their storage grows.
            "kv growth": np.ceil(cache / np.maximum(2 * ranks.layers, 1)),
            "prefill": prefilled * self.memory.element_bytes * self._working(),
            "logits": np.where(ranks.last, mine * float(spec.vocab * DTYPE_BYTES["fp64"] * SAMPLING_COPIES), 0.0),
        }
        graphs_bytes = self._constant("graphs.bytes")
        return {**found, "graphs": np.full(np.shape(cache), graphs_bytes)} if graphs_bytes else found

    def _kv_tokens(self, sequences: Ints) -> Floats:
        """Most tokens cached at once. Finished sequences leave: the largest product of those left and their tokens."""
        prompt, response = self.memory.workload.prompt.maximum, self.memory.workload.response
        spec = self.memory.spec
        if not response.quantiles:
            return np.asarray(sequences * _cached(spec, prompt + response.maximum), dtype=np.float64)
        few, where = distinct([sequences])
        _, ends, alive = segments(response, sequences[few])
        return np.asarray((alive * _cached(spec, prompt + ends)).max(axis=0)[where])


def runtime_bytes(kind: DeviceKind) -> int:
    """Bytes of a device that no model-stage gets: the runtime's context and the workspaces of matrix products."""
    return math.ceil(of_kind(kind, "context.bytes") + of_kind(kind, "workspace.bytes"))


def share(work: Work, workload: Workload, dp: int) -> int:
    """Sequences of the largest share: of a mini-batch for an update, of the whole batch otherwise (D5.8)."""
    whole = workload.mini_batch if work is Work.UPDATE else workload.sequences
    return -(-whole // dp)


def sequence_kv_bytes(spec: ModelSpec, layout: Layout, workload: Workload, kinds: Iterable[DeviceKind]) -> int:
    """KV cache of one longest sequence on the device that holds most layers, of the kind where it takes most."""
    tp, layers = np.array([layout.tp]), np.array([len(layout.layers_of(0, spec.layers))])
    return int(sequences_kv_bytes(spec, tp, layers, workload, kinds)[0])


def sequences_kv_bytes(
    spec: ModelSpec, tp: Ints, layers: Ints, workload: Workload, kinds: Iterable[DeviceKind]
) -> Ints:
    """The same by row, of so many layers cut by tp."""
    tokens = _cached(spec, workload.prompt.maximum + workload.response.maximum)
    each = [tokens * kv_token_bytes(spec, tp, layers, kind.constants) for kind in kinds]
    return np.asarray(np.maximum(np.maximum.reduce(each), 1.0), dtype=np.int64)


def micro_batches_in_flight(rows: Rows, ranks: Ranks, count: Floats) -> Floats:
    """Micro-batches whose activations a pp rank holds at once under 1F1B; `count` are all, a partial one in part.

    A rank starts as many before its first backward as ranks follow it, itself included; with `vpp` chunks a rank
    (interleaved) it starts more, of a chunk each.
    """
    after = rows.pp - ranks.index
    if (rows.vpp == 1).all():
        return np.asarray(np.minimum(after, count), dtype=np.float64)
    chunks = 2 * (after - 1) + (rows.vpp - 1) * rows.pp + 1
    return np.asarray(np.minimum(np.where(rows.vpp > 1, chunks / rows.vpp, after), count), dtype=np.float64)


def _cached(spec: ModelSpec, tokens: Floats | float) -> Floats:
    """Tokens of which a layer holds keys and values on average, in whole blocks."""
    return cached_tokens(spec, np.ceil(np.ceil(tokens) / BLOCK_TOKENS) * BLOCK_TOKENS)
