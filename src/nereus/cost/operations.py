"""Operation classes, their start efficiencies, and what one pp rank of a model computes, moves and launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nereus.core import DTYPE_BYTES, Calibration, DeviceKind, Efficiency, Head, Layout, Link, ModelSpec

CLASSES = (
    "prefill", "decode", "forward", "backward", "optimizer",
    "tp", "pp", "dp", "cp", "ep", "offload", "sync", "dispatch",
)  # fmt: skip

START_EFFICIENCY = 0.4
"""Share of the ideal rate that an unseen class is believed to reach: low, so that surprises are good ones."""
START_VARIANCE = 0.25

FORWARD_KERNELS = 34
"""Operations of one decoder layer in one forward pass; a backward pass launches twice as many."""
HEAD_KERNELS = 16
OPTIMIZER_KERNELS = 6
"""Operations of one Adam update of one tensor, with its part of the gradient norm."""
TENSORS_PER_LAYER = 9
DISPATCH_S = 5e-4
"""Sending a command to the workers of a call and hearing from all of them."""


def efficiency(calibration: Calibration, name: str) -> Efficiency:
    """What is known about a class; conservative and uncertain before the first observation."""
    return calibration.efficiency.get(name, Efficiency(START_EFFICIENCY, 0, START_VARIANCE))


def residual(calibration: Calibration, call: str) -> Efficiency:
    """Measured over predicted seconds of a call, what the classes cannot explain; 1 before the first observation."""
    return calibration.efficiency.get(f"call:{call}", Efficiency(1.0, 0, 0.0))


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does at best. A paced device's share of a core slows everything but its links (D5.11)."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float

    @classmethod
    def of(cls, kind: DeviceKind, dtype: str) -> Rates:
        """The rates of a kind of device in a dtype; the kind's slowest dtype when it does not name this one."""
        peak = kind.peak_flops.get(dtype) or min(kind.peak_flops.values())
        return cls(peak * kind.speed, kind.memory_bytes_per_s * kind.speed, kind.launch_s / kind.speed)

    @classmethod
    def slowest(cls, kinds: Sequence[DeviceKind], dtype: str) -> Rates:
        """The rates that a group of devices which wait for each other reaches."""
        each = [cls.of(kind, dtype) for kind in kinds]
        return cls(
            min(rates.flops_per_s for rates in each),
            min(rates.bytes_per_s for rates in each),
            max(rates.launch_s for rates in each),
        )

    def seconds(self, work: Operations) -> float:
        """The ideal time: the largest of arithmetic, memory traffic and launches, smoothed where they are close."""
        return math.hypot(work.flops / self.flops_per_s, work.bytes / self.bytes_per_s, work.kernels * self.launch_s)


@dataclass(frozen=True, slots=True)
class Operations:
    """An amount of work on one device."""

    flops: float
    bytes: float
    kernels: float

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.flops + other.flops, self.bytes + other.bytes, self.kernels + other.kernels)

    def __mul__(self, factor: float) -> Operations:
        return Operations(self.flops * factor, self.bytes * factor, self.kernels * factor)


@dataclass(frozen=True, slots=True)
class Shard:
    """Sizes of the part of a model that the most loaded tp rank of one pp rank computes. Widths are in elements."""

    layers: int
    hidden: int
    query: int
    keys: int
    ffn: int
    vocab: int
    first: bool
    last: bool
    scalar_head: bool
    qk_norm: bool
    element_bytes: int
    wide_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec, layout: Layout, pp_rank: int) -> Shard:
        """The shard of `spec` at `pp_rank` under `layout`."""
        element_bytes = DTYPE_BYTES[spec.dtype]
        return cls(
            layers=len(layout.layers_of(pp_rank, spec.layers)),
            hidden=spec.hidden,
            query=-(-spec.heads // layout.tp) * spec.head_dim,
            keys=-(-spec.kv_heads // layout.tp) * spec.head_dim,
            ffn=-(-spec.ffn_hidden // layout.tp),
            vocab=-(-spec.vocab // layout.tp),
            first=pp_rank == 0,
            last=pp_rank == layout.pp - 1,
            scalar_head=spec.head is Head.SCALAR,
            qk_norm=spec.qk_norm,
            element_bytes=element_bytes,
            wide_bytes=max(element_bytes, DTYPE_BYTES["fp32"]),
        )

    @property
    def layer_parameters(self) -> int:
        """Elements of one layer's matrices."""
        return self.hidden * (2 * self.query + 2 * self.keys + 3 * self.ffn)

    @property
    def head_parameters(self) -> int:
        """Elements of the head; 0 off the last pp rank."""
        return self.hidden * (1 if self.scalar_head else self.vocab) if self.last else 0

    @property
    def norm_elements(self) -> int:
        """Elements a token that a norm keeps for its backward: input and normalised state, wide, and output."""
        return self.hidden * (1 + 2 * self.wide_bytes // self.element_bytes)

    @property
    def kv_token_bytes(self) -> int:
        """KV cache of one token in all local layers."""
        return 2 * self.keys * self.layers * self.element_bytes

    def forward(self, sequences: float, length: float, response: float) -> Operations:
        """A forward pass over padded sequences of `length` tokens; the head sees the `response` tokens alone."""
        tokens = sequences * length
        layer = Operations(
            flops=tokens * (2 * self.layer_parameters + 2 * self.query * length),
            bytes=self.element_bytes
            * (self.layer_parameters + tokens * (10 * self.hidden + 4 * (self.query + self.keys) + 5 * self.ffn)),
            kernels=FORWARD_KERNELS,
        )
        return layer * self.layers + self.head(sequences * response)

    def head(self, tokens: float) -> Operations:
        """Logits (or scores) of `tokens` tokens and their log-probabilities; the embedding on the first pp rank."""
        kernels = HEAD_KERNELS * (self.first + self.last)
        width = 1 if self.scalar_head else self.vocab
        if not self.last:
            return Operations(0.0, 0.0, kernels)
        wide = 4 * self.wide_bytes * tokens * width
        weights = self.element_bytes * self.head_parameters
        return Operations(2 * tokens * self.head_parameters, weights + wide, kernels)

    def decode(self, live: float, context: float) -> Operations:
        """One decode step of `live` sequences with `context` tokens each: every weight and the KV cache are read."""
        layer = Operations(
            flops=live * (2 * self.layer_parameters + 4 * self.query * context),
            bytes=self.element_bytes * (self.layer_parameters + 2 * live * context * self.keys),
            kernels=FORWARD_KERNELS,
        )
        return layer * self.layers + self.head(live)

    def optimizer(self, parameters: int, master_bytes: int) -> Operations:
        """One Adam update of `parameters` local elements: gradient, master and two moments read, three written."""
        kernels = OPTIMIZER_KERNELS * (TENSORS_PER_LAYER * self.layers + self.first + 2 * self.last)
        return Operations(12.0 * parameters, parameters * (7.0 * master_bytes + self.element_bytes), kernels)


def all_reduce_s(link: Link, ranks: int, size_bytes: float) -> float:
    """A ring all-reduce, with the latency of a tree."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * size_bytes / link.bytes_per_s + 2 * math.ceil(math.log2(ranks)) * link.latency_s


def send_s(link: Link, size_bytes: float) -> float:
    """One point-to-point message."""
    return size_bytes / link.bytes_per_s + link.latency_s
