"""Seconds of training and of forward passes: micro-batches through the pp ranks, then gradients and the optimizer.

A unit handles the largest share of a mini-batch (D5.8) in micro-batches under one forward, one backward (1F1B). The
step of the busiest pp rank is all its micro-batches and one micro-batch of every other rank; that wait counts as `pp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from nereus.core import DTYPE_BYTES, ModelSpec, Workload
from nereus.cost.collectives import all_reduce_s, by_link, send_s
from nereus.cost.kernels import stream_s
from nereus.cost.layer import Block, MicroBatch
from nereus.cost.lengths import padded
from nereus.cost.parameters import Parameters, parameters
from nereus.cost.prices import CallPrices
from nereus.cost.ranks import Ranks
from nereus.cost.rows import Floats, Ints, Rows
from nereus.cost.site import Site

Seconds = Mapping[str, Floats]
"""Operation class → ideal seconds by row."""

START = MappingProxyType(
    {
        "dispatch_s": 5e-4,
        "dp.bucket_bytes": 25.0 * 2**20,
        "dp.overlap": 0.8,
        "optimizer.kernels": 54.0,
        "pp.scatter": 0.0,
    }
)
"""`dispatch_s`: sending a command to the workers of a call and hearing from all. `dp.bucket_bytes`: gradients are
reduced in flat buffers of this size. `dp.overlap`: share of a backward pass behind which a sharded reduction hides.
`optimizer.kernels`: operations of one Adam update of one layer. `pp.scatter`: the links of a stage boundary that share
one hidden state are tp to this power."""

MINI_BATCH_COMMANDS = 2
"""An update is prepared and then committed (D5.6)."""


def forward(spec: ModelSpec, rows: Rows, workload: Workload, site: Site) -> CallPrices:
    """Forward passes over a whole step's batch (inference, old log-probabilities), on the unit with most of it."""
    share = -(-workload.sequences // rows.dp)
    return Pipeline(spec, rows, workload, site, train=False).price(share)


def update(spec: ModelSpec, rows: Rows, workload: Workload, site: Site) -> CallPrices:
    """All mini-batches and epochs of a step, on the unit with most of them."""
    share = -(-workload.mini_batch // rows.dp)
    return Pipeline(spec, rows, workload, site, train=True).price(share, workload.updates)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Prices one call of one model; rows may differ in how much of it their unit handles."""

    spec: ModelSpec
    rows: Rows
    workload: Workload
    site: Site
    train: bool

    def price(self, share: Ints, repeats: Ints | int = 1) -> CallPrices:
        """The call `repeats` times, of which a unit handles `share` sequences each time."""
        rows = self.rows
        size = np.minimum(rows.micro_batch, share)
        full, rest = np.divmod(share, size)
        ranks = Ranks.ends(rows, self.spec.layers)
        counts = np.array([rank.count for rank in ranks])
        ones = self._micro_batches(size, ranks)
        totals = [{name: full * seconds for name, seconds in one.items()} for one in ones]
        if rest.any():
            lasts = self._micro_batches(np.maximum(rest, 1), ranks)
            for total, last in zip(totals, lasts, strict=True):
                for name in total:
                    total[name] = total[name] + (rest > 0) * last[name]
        for rank, total, one in zip(ranks, totals, ones, strict=True):
            self._add_replicas(rank, total, one, full + (rest > 0))
        weights = np.array([self.site.weigh(total) for total in totals])
        busiest = np.argmax(np.where(counts > 0, weights, -1.0), axis=0)
        waits = np.array([self.site.weigh(one) for one in ones])
        wait_s = ((counts * waits).sum(axis=0) - np.choose(busiest, waits)) / rows.vpp
        return self._finish(
            {name: np.choose(busiest, [total[name] for total in totals]) for name in totals[0]}, wait_s, repeats
        )

    def _finish(self, total: Seconds, wait_s: Floats, repeats: Ints | int) -> CallPrices:
        """The wait is predicted time already, so it enters the ideal seconds such that weighing gives it back."""
        commands = MINI_BATCH_COMMANDS if self.train else 1
        ideal = {name: repeats * seconds for name, seconds in total.items()}
        ideal["pp"] = ideal["pp"] + repeats * wait_s * self.site.efficiency("pp").value
        ideal["dispatch"] = repeats * np.full(len(self.rows), commands * self._constant("dispatch_s"))
        kept = {name: seconds for name, seconds in ideal.items() if seconds.any()}
        return CallPrices(self.site.weigh(kept), kept)

    def _micro_batches(self, size: Ints, ranks: tuple[Ranks, ...]) -> list[dict[str, Floats]]:
        """One micro-batch of `size` sequences on each kind of pp rank, by class."""
        rows, spec = self.rows, self.spec
        block = Block(spec, rows, self.site, self._batch(size))
        kinds = [(False, spec.layers), (True, 0)] if not spec.experts else [(False, spec.dense_layers), (True, None)]
        forwards = {routed: block.forward(routed) for routed, layers in kinds if layers != 0}
        backwards = {routed: block.backward(routed) for routed in forwards} if self.train else {}
        send_s, pair_s = self._send_s(block), block.hidden_tp_s()
        found = []
        for rank in ranks:
            dense = np.clip(spec.dense_layers - rank.before, 0, rank.layers) if spec.experts else rank.layers
            layers = {False: dense, True: rank.layers - dense}
            neighbours = (rows.pp > 1) * (2 - rank.first - rank.last)
            one = {
                "forward": sum(layers[routed] * each.compute for routed, each in forwards.items())
                + rank.first * block.embedding_s()
                + rank.last * block.head_s(),
                "tp": rank.first * pair_s + rank.last * block.head_tp_s(),
                "cp": np.zeros(len(rows)),
                "ep": np.zeros(len(rows)),
                "pp": neighbours * rows.vpp * send_s * (2 if self.train else 1),
            }
            if self.train:
                one["backward"] = sum(
                    layers[routed] * each.compute for routed, each in backwards.items()
                ) + rank.last * block.head_s(backward=True)
            for passes in (forwards, backwards):
                for routed, each in passes.items():
                    for name in ("tp", "cp", "ep"):
                        one[name] = one[name] + layers[routed] * getattr(each, name)
            found.append({name: np.asarray(seconds, dtype=float) for name, seconds in one.items()})
        return found

    def _batch(self, size: Ints) -> MicroBatch:
        """Sequences padded to the longest that so many are expected to hold; the head sees their responses."""
        sizes, index = np.unique(size, return_inverse=True)
        response = np.array([padded(self.workload.response, int(each)) for each in sizes])[index]
        return MicroBatch(size.astype(float), self.workload.prompt.maximum + response, size * response)

    def _send_s(self, block: Block) -> Floats:
        """One hidden state to the next pp rank."""
        size = block.hidden_bytes / self.rows.tp ** self._constant("pp.scatter")
        size = np.where(self.rows.sequence_parallel, block.hidden_bytes / self.rows.tp, size)
        return by_link(self.site, self.rows.pp_spans, lambda link: send_s(link, size))

    def _add_replicas(self, rank: Ranks, total: dict[str, Floats], one: Seconds, micro_batches: Ints) -> None:
        """Once a mini-batch: gradients are summed over replicas and the optimizer steps.

        ZeRO-1 and 2 scatter the gradients and gather the parameters, behind the last backward pass and the next forward
        pass. ZeRO-3 gathers the parameters in every pass and scatters the gradients of every micro-batch.
        """
        rows, spec = self.rows, self.spec
        parts = parameters(spec, rows.tp, rows.ep)
        plain, routed = self._held(parts, rank)
        ranks = rows.dp * rows.cp
        copies = np.maximum(ranks * np.where(rows.ep > 1, rows.tp, 1) // rows.ep, 1)
        if self.train:
            gradient, weight = self._gradient_bytes, DTYPE_BYTES[spec.dtype]
            whole_s = self._reduce_s(ranks, plain * gradient) + self._reduce_s(copies, routed * gradient)
            half_s = whole_s / 2
            gather_s = half_s * weight / gradient
            behind_s = self._constant("dp.overlap") * one["backward"]
            scattered_s = np.maximum(half_s - behind_s, 0.0) + np.maximum(gather_s - behind_s, 0.0)
            sharded_s = micro_batches * np.maximum(half_s + 2 * gather_s - behind_s - one["forward"], 0.0)
            total["dp"] = np.where(rows.zero == 0, whole_s, np.where(rows.zero < 3, scattered_s, sharded_s))
            total["optimizer"] = self._optimizer_s(rank, plain / np.where(rows.zero, ranks, 1), routed, copies)
        elif (rows.zero == 3).any():
            gather_s = self._reduce_s(ranks, plain * DTYPE_BYTES[spec.dtype]) / 2
            behind_s = self._constant("dp.overlap") * one["forward"]
            total["dp"] = np.where(rows.zero == 3, micro_batches * np.maximum(gather_s - behind_s, 0.0), 0.0)
        else:
            total["dp"] = np.zeros(len(rows))

    def _held(self, parts: Parameters, rank: Ranks) -> tuple[Floats, Floats]:
        """Elements on a device of a pp rank: what every token passes, and routed experts."""
        spec = self.spec
        dense = np.clip(spec.dense_layers - rank.before, 0, rank.layers) if spec.experts else rank.layers
        tied = rank.last & ~rank.first & spec.tied_embeddings
        plain = dense * parts.dense_layer + (rank.first | tied) * parts.first_rank + rank.last * parts.last_rank
        if not spec.experts:
            return plain.astype(float), np.zeros(len(self.rows))
        routed = rank.layers - dense
        return (plain + routed * parts.outside_experts).astype(float), (routed * parts.routed_experts).astype(float)

    @property
    def _gradient_bytes(self) -> int:
        """Gradients are summed in at least fp32, except where a loss scale lets them stay in fp16."""
        size = DTYPE_BYTES[self.spec.dtype]
        return size if self.spec.dtype == "fp16" else max(size, DTYPE_BYTES["fp32"])

    def _reduce_s(self, ranks: Ints, size_bytes: Floats) -> Floats:
        """An all-reduce in buckets."""
        rows = self.rows
        buckets = np.maximum(np.ceil(size_bytes / self._constant("dp.bucket_bytes")), 1.0)
        local = np.where(rows.dp_spans, np.clip(rows.node // rows.size, 1, rows.dp), 1)
        return buckets * by_link(
            self.site, rows.dp_spans, lambda link: all_reduce_s(link, ranks, size_bytes / buckets, local)
        )

    def _optimizer_s(self, rank: Ranks, plain: Floats, routed: Floats, copies: Ints) -> Floats:
        """Adam: gradient, master and two moments read, three written, and the weight in its own precision."""
        elements = plain + routed / np.where(self.rows.zero, copies, 1)
        wide = max(DTYPE_BYTES[self.spec.dtype], DTYPE_BYTES["fp32"])
        traffic_s = stream_s(self.site.rates, elements * (7.0 * wide + DTYPE_BYTES[self.spec.dtype]))
        tensors = rank.layers + (rank.first + 2 * rank.last) / 9
        return np.hypot(traffic_s, self._constant("optimizer.kernels") * tensors * self.site.rates.launch_s)

    def _constant(self, name: str) -> float:
        return dict(self.site.rates.constants).get(name, START[name])
