"""One pp rank of every row: which layers it holds and which ends of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from nereus.core import Layout, ModelSpec
from nereus.cost.rows import Bools, Floats, Ints, Rows

RECENT = 8
"""Rows of which what follows is remembered: the same are asked for seconds, memory and synchronisation in turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """Columns, one pp rank a row. They go with `Rows` of the same length, or with a single row (broadcast).

    `before` counts the layers of earlier ranks, `count` the real ranks that one stands for. A rank that a row does not
    have holds no layer and no end.
    """

    index: Ints
    before: Ints
    layers: Ints
    first: Bools
    last: Bools
    count: Ints

    @classmethod
    @lru_cache(maxsize=RECENT)
    def ends(cls, rows: Rows, layers: int) -> tuple[Ranks, ...]:
        """The first, the fullest middle and the last pp rank of a model of `layers` layers, as far as any row has them.

        The middle one counts as rank 1, which holds most micro-batches in flight, and as placed last among them, where
        fewest leading dense layers are: together never less than any real one. With pp 1 the first is the last.
        """
        none, every, single = np.zeros_like(rows.pp), np.ones_like(rows.offload), rows.pp == 1
        one, most = np.ones_like(rows.pp), int(rows.pp.max(initial=1))
        first = cls(none, none, rows.layers_first, every, single, one)
        if most == 1:
            return (first,)
        last_before = np.where(single, 0, layers - rows.layers_last)
        last = cls(rows.pp - 1, last_before, rows.layers_last, single, every, (~single).astype(np.int64))
        if most == 2:
            return first, last
        middle = np.where(rows.pp > 2, rows.layers_middle, 0)
        index, count = np.minimum(rows.pp - 1, 1), np.maximum(rows.pp - 2, 0)
        return first, cls(index, last_before - middle, middle, ~every, ~every, count), last

    @classmethod
    @lru_cache(maxsize=RECENT)
    def stacked(cls, rows: Rows, layers: int) -> Ranks:
        """`ends` as a first axis. Layers and counts are whole numbers as floats, like what they are multiplied with."""
        columns = zip(
            *((r.index, r.before, r.layers, r.first, r.last, r.count) for r in cls.ends(rows, layers)), strict=True
        )
        index, before, held, first, last, count = map(np.array, columns)
        return cls(index, before, held.astype(float), first, last, count.astype(float))

    @classmethod
    def emptiest(cls, rows: Rows, layers: int) -> Ranks:
        """`stacked` with a middle one of the fewest layers, most of them dense, and the fewest micro-batches in flight:
        together never more than any real one.
        """
        found = cls.stacked(rows, layers)
        if len(found.count) < 3:
            return found
        index, before, held = found.index.copy(), found.before.copy(), found.layers.copy()
        there = rows.pp > 2
        index[1] = np.maximum(rows.pp - 2, 0)
        before[1] = np.where(there, rows.layers_first, 0)
        held[1] = np.where(there, rows.layers_last, 0)
        return replace(found, index=index, before=before, layers=held)

    @classmethod
    def every(cls, layout: Layout, layers: int) -> Ranks:
        """All pp ranks of one layout, in order."""
        held = [layout.layers_of(rank, layers) for rank in range(layout.pp)]
        index = np.arange(layout.pp)
        return cls(
            index,
            np.array([layers_of.start for layers_of in held], dtype=np.int64),
            np.array([len(layers_of) for layers_of in held], dtype=np.int64),
            index == 0,
            index == layout.pp - 1,
            np.ones_like(index),
        )

    def busiest(self, seconds: Floats) -> Ints:
        """The slowest of each row's ranks, the first axis of `seconds`: where it lies in flattened columns."""
        slowest, size = seconds[0], seconds.shape[1]
        which = np.zeros(size, dtype=np.int64)
        for rank in range(1, len(seconds)):
            slower = (seconds[rank] > slowest) & (self.count[rank] > 0)
            which[slower] = rank
            slowest = np.where(slower, seconds[rank], slowest)
        return np.asarray(which * size + np.arange(size))

    def dense(self, spec: ModelSpec) -> Ints:
        """How many of its layers have no experts: the model's leading ones, or all."""
        return np.clip(spec.dense_layers - self.before, 0, self.layers) if spec.experts else self.layers
