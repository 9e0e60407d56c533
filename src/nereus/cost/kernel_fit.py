"""Fit the constants of kernels and collectives to timings of single operations, by size.

What `nereus calibrate` measured on a machine, or a public table of operations. Errors are logarithms, large ones count
little (a kernel library has cliffs that no smooth form follows), and a constant of which the timings say nothing stays
at its start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from nereus.core import DeviceKind, Link
from nereus.cost import collectives
from nereus.cost.kernels import Rates, attention_s, decode_attention_s, gemm_s
from nereus.cost.rows import Bools, Floats, Ints

Constants = Mapping[str, float]

GEMM = {
    "gemm.start_s": 4e-6,
    "gemm.share": 0.8,
    "gemm.half_k": 100.0,
    "gemm.half_mn": 2e5,
    "gemm.stream": 0.8,
    "gemm.power": 4.0,
}
ATTENTION = {"attention.start_s": 1e-5, "attention.share": 0.6, "attention.half_tokens": 1000.0}
DECODE_ATTENTION = {
    "decode_attention.start_s": 1e-5,
    "decode_attention.share": 0.8,
    "decode_attention.tokens": 100.0,
}
COLLECTIVE = {
    "latency_s": 3e-6,
    "collective.start_s": 5e-6,
    "collective.fill_s": 5e-5,
    "collective.fill_bytes": 1e7,
    "collective.few_ranks": 0.3,
    "all_reduce.share": 0.8,
    "gather.share": 0.7,
}
"""`latency_s` is a field of the link, fitted with its constants."""
HOLD = 0.02
"""Pull of a constant's logarithm to its start, beside residuals of one timing."""
MOST_SHARE = 1.2
"""No kernel gets further beyond a nominal peak."""
SOFT = 0.1
"""Residual from which one timing counts less than in proportion."""


@dataclass(frozen=True, slots=True)
class Gemms:
    """Timed products of (m, k) and (k, n) matrices."""

    m: Floats
    n: Floats
    k: Floats
    seconds: Floats
    element_bytes: float = 2.0

    def __getitem__(self, rows: Bools) -> Gemms:
        return Gemms(self.m[rows], self.n[rows], self.k[rows], self.seconds[rows], self.element_bytes)

    def predicted(self, kind: DeviceKind, precision: str) -> Floats:
        """Seconds by the constants of `kind`."""
        return gemm_s(Rates.of(kind, precision), self.m, self.n, self.k, self.element_bytes)


@dataclass(frozen=True, slots=True)
class Attentions:
    """Timed attention: of whole sequences, or of one new token each to `tokens` cached ones."""

    decode: bool
    sequences: Floats
    tokens: Floats
    heads: Floats
    kv_heads: Floats
    head_dim: int
    seconds: Floats
    element_bytes: float = 2.0

    def __getitem__(self, rows: Bools) -> Attentions:
        names = ("sequences", "tokens", "heads", "kv_heads", "seconds")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def predicted(self, kind: DeviceKind, precision: str) -> Floats:
        """Seconds by the constants of `kind`."""
        rates = Rates.of(kind, precision)
        if not self.decode:
            return attention_s(rates, self.sequences, self.tokens, self.heads, self.head_dim)
        return decode_attention_s(
            rates, self.sequences, self.tokens, self.kv_heads, self.head_dim, self.element_bytes, self.heads
        )


@dataclass(frozen=True, slots=True)
class Collectives:
    """Timed collectives; `operation` names functions of `cost.collectives`."""

    operation: NDArray[np.str_]
    ranks: Ints
    size_bytes: Floats
    seconds: Floats
    local: Ints

    def __getitem__(self, rows: Bools) -> Collectives:
        return Collectives(
            self.operation[rows], self.ranks[rows], self.size_bytes[rows], self.seconds[rows], self.local[rows]
        )

    def predicted(self, link: Link) -> Floats:
        """Seconds over `link`."""
        found = np.zeros(len(self.seconds))
        for name in np.unique(self.operation):
            rows = self.operation == name
            price = getattr(collectives, f"{name}_s")
            found[rows] = price(link, self.ranks[rows], self.size_bytes[rows], self.local[rows])
        return found


Kernels = Gemms | Attentions


def fit_kernels(kind: DeviceKind, timed: Kernels, precision: str) -> DeviceKind:
    """The kind with the constants of one class of kernels fitted."""
    start = GEMM if isinstance(timed, Gemms) else DECODE_ATTENTION if timed.decode else ATTENTION

    def with_constants(found: Constants) -> DeviceKind:
        return replace(kind, constants=dict(kind.constants) | dict(found))

    best = _fit(start, lambda found: timed.predicted(with_constants(found), precision), timed.seconds)
    return with_constants(best)


def fit_link(link: Link, timed: Collectives, names: Sequence[str] = tuple(COLLECTIVE)) -> Link:
    """The link with the constants `names` of its collectives fitted."""

    def with_constants(found: Constants) -> Link:
        given = dict(link.constants) | {name: value for name, value in found.items() if name != "latency_s"}
        return replace(link, latency_s=found.get("latency_s", link.latency_s), constants=given)

    start = {name: COLLECTIVE[name] for name in names}
    best = _fit(start, lambda found: timed.predicted(with_constants(found)), timed.seconds)
    return with_constants(best)


def errors(predicted: Floats, seconds: Floats) -> Floats:
    """Relative errors."""
    return np.abs(predicted / seconds - 1.0)


def _fit(start: Constants, predict: Callable[[Constants], Floats], seconds: Floats) -> dict[str, float]:
    names, origin = list(start), np.log(list(start.values()))

    def residuals(logs: Floats) -> Floats:
        predicted = predict(dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.concatenate([np.log(predicted / seconds), HOLD * (logs - origin)])

    # Within a factor of e^8 of the start every form stays finite.
    highest = np.array([math.log(MOST_SHARE) if name.endswith(("share", "stream")) else np.inf for name in names])
    bounds = (origin - 8, np.minimum(origin + 8, highest))
    found = least_squares(residuals, origin, bounds=bounds, loss="soft_l1", f_scale=SOFT)
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))
