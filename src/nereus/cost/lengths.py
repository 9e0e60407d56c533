"""Length distributions: what a micro-batch is padded to and how many sequences still decode (D7.2)."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nereus.core import Lengths

GROUPS = 24
"""Sequences are followed through decoding in at most so many groups of equal size."""

LEVELS = 64
"""So many parts of equal probability make an expected length."""

_Z95 = NormalDist().inv_cdf(0.95)


def at(lengths: Lengths, level: float) -> float:
    """The length that a share `level` of the sequences does not exceed.

    Measured quantiles when there are any, else a log-normal through mean and p95, cut at the maximum.
    """
    if lengths.quantiles:
        levels = np.linspace(0.0, 1.0, len(lengths.quantiles))
        return float(np.interp(level, levels, lengths.quantiles))
    if lengths.mean <= 0 or lengths.p95 <= lengths.mean:
        return lengths.mean
    ratio = math.log(lengths.p95 / lengths.mean)
    sigma = _Z95 - math.sqrt(max(_Z95 * _Z95 - 2 * ratio, 0.0))
    z = NormalDist().inv_cdf(min(max(level, 1e-6), 1 - 1e-6))
    return min(lengths.mean * math.exp(sigma * z - sigma * sigma / 2), lengths.maximum)


@lru_cache(maxsize=1024)
def padded(lengths: Lengths, sequences: int) -> float:
    """The expected longest of `sequences` sequences: what a micro-batch of that size is padded to.

    Of one alone that is the mean. The longest of n is below a length as often as one is, to the power n.
    """
    if sequences == 1:
        return lengths.mean
    levels = [((index + 0.5) / LEVELS) ** (1.0 / sequences) for index in range(LEVELS)]
    return max(lengths.mean, sum(at(lengths, level) for level in levels) / LEVELS)


def moments(lengths: Lengths) -> tuple[float, float]:
    """Mean and variance: of the quantiles or the log-normal where the lengths differ."""
    values = np.array([at(lengths, (index + 0.5) / GROUPS) for index in range(GROUPS)])
    return lengths.mean, float(values.var())


def decode_profile(lengths: Lengths, sequences: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(ends, live): in segment i, up to `ends[i]` tokens, `live[i]` of the sequences still decode.

    The last segment ends with the longest sequence of the whole batch: it is somebody's, and everybody waits for it.
    """
    groups = min(sequences, GROUPS)
    live = np.ceil(sequences * (1.0 - np.arange(groups) / groups))
    return np.array(_ends(lengths, groups)), live


def segments(
    lengths: Lengths, live: NDArray[np.int64] | NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(steps, ends, alive), each [segment, row]: the same for many numbers of sequences, with the steps of a segment.

    Where there are fewer segments nobody is alive in the others.
    """
    counts, index = np.unique(live, return_inverse=True)
    groups = np.minimum(counts, GROUPS).astype(np.int64)
    known = [_ends(lengths, group) for group in groups.tolist()]
    ends = np.array([(*each, *each[-1:] * (GROUPS - len(each))) for each in known]).T
    alive = np.ceil(counts * np.maximum(1.0 - np.arange(GROUPS)[:, None] / groups, 0.0))
    steps = np.diff(ends, axis=0, prepend=0.0)
    return steps[:, index], ends[:, index], alive[:, index]


@lru_cache(maxsize=1024)
def _ends(lengths: Lengths, groups: int) -> tuple[float, ...]:
    """Where each of so many groups of equal size ends."""
    ends = np.array([at(lengths, (index + 0.5) / groups) for index in range(groups)])
    ends[-1] = lengths.maximum
    return tuple(np.maximum.accumulate(ends).tolist())
