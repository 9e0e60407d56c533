"""Seconds of one kernel on one device as a function of its size; every function takes and gives numpy arrays.

Constants are those of the device kind by name. Forms are physical: a fixed start, arithmetic that saturates with the
size of the output and the length of the inner sum, memory traffic, and a smooth maximum of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from nereus.core import DeviceKind
from nereus.cost.constants import KIND, of_kind
from nereus.cost.rows import Floats, Ints

LOW = MappingProxyType({"fp8": 1.0, "fp4": 0.5625})
"""Precisions that only matrix products of whole layers run in, with the bytes of an element and its part of a scale."""

Numbers = Floats | Ints | float
"""A size: one for all rows or one a row."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does at best in one precision, and the constants that say how far kernels get there."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    constants: tuple[tuple[str, float], ...] = ()
    wide_flops_per_s: float = 0.0
    """Of what stays in bf16 where matrix products run in fp8 or fp4; 0 where all is in one precision."""
    low_bytes: float = 0.0
    """Of an element of a matrix product in fp8 or fp4; 0 where all is in one precision."""

    named: Mapping[str, float] = field(init=False, repr=False, compare=False)
    """The constants again, for looking one up."""
    _every: Mapping[str, float] = field(init=False, repr=False, compare=False)
    wide: Rates = field(init=False, repr=False, compare=False)
    """The rates of attention, router and head, which are never in fp8 or fp4."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", dict(self.constants))
        object.__setattr__(self, "_every", {**KIND, **self.named})
        whole = self.wide_flops_per_s
        wide = replace(self, flops_per_s=whole, wide_flops_per_s=0.0) if whole else self
        object.__setattr__(self, "wide", wide)

    @classmethod
    def of(cls, kind: DeviceKind, precision: str) -> Rates:
        """The rates of a kind of device; its slowest precision when it does not name this one.

        A kind without fp8 or fp4 keeps weights in it and widens them for its products.
        """
        peak, wide = kind.peak_flops.get(precision) or min(kind.peak_flops.values()), 0.0
        if precision in LOW:
            wide = kind.peak_flops.get("bf16", 0.0)
            low_share = of_kind(kind, "gemm.low_share")
            peak = low_share * peak if precision in kind.peak_flops else wide or peak
        known = tuple(sorted(kind.constants.items()))
        rates = (peak * kind.speed, kind.memory_bytes_per_s * kind.speed, kind.launch_s / kind.speed)
        return cls(*rates, known, wide * kind.speed, LOW.get(precision, 0.0))

    @classmethod
    def slowest(cls, kinds: Sequence[DeviceKind], precision: str) -> Rates:
        """The rates that a group of devices which wait for each other reaches."""
        each = [cls.of(kind, precision) for kind in kinds]
        return cls(
            min(rates.flops_per_s for rates in each),
            min(rates.bytes_per_s for rates in each),
            max(rates.launch_s for rates in each),
            min(each, key=lambda rates: rates.flops_per_s).constants,
            min(rates.wide_flops_per_s for rates in each),
            max(rates.low_bytes for rates in each),
        )

    def __getitem__(self, name: str) -> float:
        """A constant by name."""
        return self._every[name]


def gemm_s(rates: Rates, m: Numbers, n: Numbers, k: Numbers, element_bytes: float = 2.0) -> Floats:
    """An (m, k) × (k, n) product.

    Short inner sums and outputs too small to fill the device waste arithmetic; the three matrices are moved once.
    """
    flops = 2.0 * (m * n + rates["gemm.half_mn"]) * (k + rates["gemm.half_k"])
    compute_s = flops / (rates.flops_per_s * rates["gemm.share"])
    traffic_s = element_bytes * (m * k + k * n + m * n) / (rates.bytes_per_s * rates["gemm.stream"])
    return rates["gemm.start_s"] + _smooth_maximum(compute_s, traffic_s, rates["gemm.power"])


def attention_s(
    rates: Rates, sequences: Numbers, tokens: Numbers, heads: Numbers, head_dim: float, causal: bool = True
) -> Floats:
    """Scores and weighted values of whole sequences of `tokens` tokens (prefill, forward), in tiles.

    A sequence takes as long as if it had `attention.half_tokens` more keys for each query.
    """
    keys = tokens * (0.5 if causal else 1.0) + 0.5 * rates["attention.half_tokens"]
    flops = 4.0 * sequences * tokens * keys * heads * head_dim
    return np.asarray(rates["attention.start_s"] + flops / (rates.wide.flops_per_s * rates["attention.share"]))


def decode_attention_s(
    rates: Rates,
    sequences: Numbers,
    context: Numbers,
    kv_heads: Numbers,
    head_dim: float,
    element_bytes: float = 2.0,
    heads: Numbers = 0.0,
) -> Floats:
    """One new token of each sequence against `context` cached ones: the cache is read once for all its query heads.

    A sequence takes as long as if it had `decode_attention.tokens` more cached tokens.
    """
    read_bytes = 2.0 * element_bytes * sequences * (context + rates["decode_attention.tokens"]) * kv_heads * head_dim
    flops = 4.0 * sequences * context * heads * head_dim
    traffic_s = read_bytes / (rates.bytes_per_s * rates["decode_attention.share"])
    compute_s = flops / (rates.wide.flops_per_s * rates["attention.share"])
    return np.asarray(rates["decode_attention.start_s"] + np.maximum(traffic_s, compute_s))


def stream_s(rates: Rates, size_bytes: Numbers) -> Floats:
    """Element-wise work (norms, activations, optimizer): the bytes it reads and writes."""
    return np.asarray(size_bytes / (rates.bytes_per_s * rates["stream.share"]))


def launched_s(rates: Rates, device_s: Numbers, kernels: Numbers) -> Floats:
    """`device_s` of kernels which the host launches one by one: the larger of both, smoothed where they are close."""
    return _smooth_maximum(device_s, kernels * rates.launch_s, rates["launch.power"])


def _smooth_maximum(one: ArrayLike, other: ArrayLike, power: float) -> Floats:
    """(one^power + other^power)^(1/power): their maximum for a large power."""
    return np.asarray((np.power(one, power) + np.power(other, power)) ** (1.0 / power))
