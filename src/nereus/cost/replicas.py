"""What replicas of a unit cost each other in an update: gradients are summed, the optimizer steps (ZeRO 0 to 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nereus.core import DTYPE_BYTES, ModelSpec
from nereus.cost.collectives import all_reduce_s, by_link
from nereus.cost.held import Held
from nereus.cost.kernels import stream_s
from nereus.cost.parameters import TENSORS_PER_LAYER
from nereus.cost.ranks import Ranks
from nereus.cost.rows import Floats, Ints, Rows
from nereus.cost.site import Site


@dataclass(frozen=True, slots=True)
class Replicas:
    """Seconds by pp rank (first axis) and row, from those of one micro-batch by class."""

    spec: ModelSpec
    rows: Rows
    site: Site
    ranks: Ranks

    def update(self, one: Mapping[str, Floats], micro_batches: Ints) -> dict[str, Floats]:
        """Once a mini-batch, which has so many micro-batches.

        ZeRO-0 sums the gradients after the last backward pass. ZeRO-1 and 2 scatter them behind it and gather the
        parameters behind the next forward pass. ZeRO-3 gathers the parameters in every pass, both ways, and scatters
        the gradients of every micro-batch.
        """
        rows, weight = self.rows, DTYPE_BYTES[self.spec.dtype]
        held = self._held()
        whole_s = self._summed_s(held, self._gradient_bytes)
        scatter_s, gather_s = whole_s / 2, whole_s / 2 * weight / self._gradient_bytes
        if not rows.zero.any():
            return {"dp": whole_s, "optimizer": self._optimizer_s(held.elements(rows.zero > 0))}
        share = self.site.rates["dp.overlap"]
        forward_s, backward_s = share * one["forward"], share * one["backward"]
        once_s = np.maximum(scatter_s - backward_s, 0.0) + np.maximum(gather_s - forward_s, 0.0)
        every_s = np.maximum(scatter_s + gather_s - backward_s, 0.0) + np.maximum(gather_s - forward_s, 0.0)
        dp_s = np.where(rows.zero == 0, whole_s, np.where(rows.zero < 3, once_s, micro_batches * every_s))
        return {"dp": dp_s, "optimizer": self._optimizer_s(held.elements(rows.zero > 0))}

    def gather(self, one: Mapping[str, Floats], micro_batches: Ints) -> dict[str, Floats]:
        """What sharded parameters (ZeRO-3) cost forward passes alone."""
        sharded = self.rows.zero == 3
        if not sharded.any():
            return {}
        gather_s = self._summed_s(self._held(), DTYPE_BYTES[self.spec.dtype])
        behind_s = self.site.rates["dp.overlap"] * one["forward"]
        return {"dp": np.where(sharded, micro_batches * np.maximum(gather_s / 2 - behind_s, 0.0), 0.0)}

    def _held(self) -> Held:
        """Elements and copies of what a device holds."""
        return Held.of(self.spec, self.rows, self.ranks)

    @property
    def _gradient_bytes(self) -> int:
        """Gradients are summed in at least fp32, except where a loss scale lets them stay in fp16."""
        size = DTYPE_BYTES[self.spec.dtype]
        return size if self.spec.dtype == "fp16" else max(size, DTYPE_BYTES["fp32"])

    @property
    def _local_copies(self) -> Ints:
        """Of the copies of a rank, how many lie on one node."""
        rows = self.rows
        return np.asarray(np.clip(rows.node // rows.size, 1, rows.dp) * np.clip(rows.node // rows.tp, 1, rows.cp))

    def _summed_s(self, held: Held, element_bytes: int) -> Floats:
        """All-reduces of what every token passes, and of experts: of these a node has fewer copies, by ep."""
        summed_s = self._reduce_s(held.dense_replicas, self._local_copies, element_bytes * held.dense)
        if not self.spec.experts:
            return summed_s
        local = np.maximum(self._local_copies * np.where(self.rows.ep > 1, self.rows.tp, 1) // self.rows.ep, 1)
        return summed_s + self._reduce_s(held.expert_replicas, local, element_bytes * held.experts)

    def _reduce_s(self, ranks: Ints, local: Ints, size_bytes: Floats) -> Floats:
        """An all-reduce in buckets, among ranks of which a node has `local`."""
        spans = self.rows.dp_spans | self.rows.cp_spans
        buckets = np.maximum(np.ceil(size_bytes / self.site.rates["dp.bucket_bytes"]), 1.0)
        ports = np.where(spans, local, 1)
        return buckets * by_link(self.site, spans, lambda link: all_reduce_s(link, ranks, size_bytes / buckets, ports))

    def _optimizer_s(self, elements: Floats) -> Floats:
        """Adam: gradient, master and two moments read, three written, and the weight in its own precision."""
        element_bytes, ranks = DTYPE_BYTES[self.spec.dtype], self.ranks
        wide = max(element_bytes, DTYPE_BYTES["fp32"])
        traffic_s = stream_s(self.site.rates, elements * (7.0 * wide + element_bytes))
        layers = ranks.layers + (ranks.first + 2 * ranks.last) / TENSORS_PER_LAYER
        return np.hypot(traffic_s, self.site.rates["optimizer.kernels"] * layers * self.site.rates.launch_s)
