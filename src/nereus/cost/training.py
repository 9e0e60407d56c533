"""Seconds of training and of forward passes: micro-batches through the pp ranks, then gradients and the optimizer.

A unit handles the largest share of a mini-batch (D5.8) in micro-batches under one forward, one backward (1F1B). The
step of the busiest pp rank is all its micro-batches and one micro-batch of every other rank; that wait counts as `pp`.

Many rows share the sizes of their micro-batches: layers are priced once for each distinct one. Models that differ in
their head alone, as an actor and its critic, share all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from nereus.core import Head, ModelSpec, Workload
from nereus.cost.collectives import by_link, send_s
from nereus.cost.layer import Block, MicroBatch
from nereus.cost.lengths import moments, padded
from nereus.cost.prices import CallPrices
from nereus.cost.ranks import RECENT, Ranks
from nereus.cost.replicas import Replicas
from nereus.cost.rows import Floats, Ints, Rows, distinct
from nereus.cost.site import Site

Seconds = Mapping[str, Floats]
"""Operation class → ideal seconds by pp rank (first, fullest middle, last) and row."""

MINI_BATCH_COMMANDS = 2
"""An update is prepared and then committed (D5.6)."""


def forward(spec: ModelSpec, rows: Rows, workload: Workload, site: Site) -> CallPrices:
    """Forward passes over a whole step's batch (inference, old log-probabilities), on the unit with most of it."""
    return Pipeline(spec, rows, workload, site, train=False).price(_shares(rows, workload.sequences))


def update(spec: ModelSpec, rows: Rows, workload: Workload, site: Site) -> CallPrices:
    """All mini-batches and epochs of a step, on the unit with most of them."""
    shares = _shares(rows, workload.mini_batch)
    return Pipeline(spec, rows, workload, site, train=True).price(shares, workload.updates)


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """What a unit handles by row, known by identity: `full` micro-batches of `size` sequences, then one of `rest`."""

    size: Ints
    full: Ints
    rest: Ints

    @classmethod
    def of(cls, rows: Rows, share: Ints) -> Shares:
        """`share` sequences cut as the rows say."""
        size = np.minimum(rows.micro_batch, share)
        return cls(size, *np.divmod(share, size))


@lru_cache(maxsize=RECENT)
def _shares(rows: Rows, sequences: int) -> Shares:
    return Shares.of(rows, -(-sequences // rows.dp))


@dataclass(frozen=True, slots=True)
class Body:
    """One micro-batch by class without the head. `block` has one row of each distinct kind, `index` says whose."""

    block: Block
    index: Ints
    seconds: Seconds

    def column(self, seconds: Floats) -> Floats:
        """Those of the block's rows by row."""
        return np.asarray(seconds, dtype=float)[self.index]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Prices one call of one model; rows may differ in how much of it their unit handles."""

    spec: ModelSpec
    rows: Rows
    workload: Workload
    site: Site
    train: bool

    def price(self, shares: Shares, repeats: Ints | int = 1) -> CallPrices:
        """The call `repeats` times, of which a unit handles its share each time."""
        rows, full, rest = self.rows, shares.full.astype(float), shares.rest
        ranks = Ranks.stacked(rows, self.spec.layers)
        one = self._micro_batch(shares, ranks)
        total = {name: full * seconds for name, seconds in one.items()}
        if rest.any():
            last = self._micro_batch(shares, ranks, last=True)
            total = {name: seconds + (rest > 0) * last[name] for name, seconds in total.items()}
        replicas = Replicas(self.spec, rows, self.site, ranks)
        total |= replicas.update(one, full + (rest > 0)) if self.train else replicas.gather(one, full + (rest > 0))
        weights, waits = self.site.weigh(total), self.site.weigh(one)
        busiest = ranks.busiest(weights)
        wait_s = ((ranks.count * waits).sum(axis=0) - waits.take(busiest)) / rows.vpp
        ideal = {name: repeats * seconds.take(busiest) for name, seconds in total.items()}
        # The wait is predicted time already: it enters the ideal seconds such that weighing gives it back.
        ideal["pp"] = ideal["pp"] + repeats * wait_s * self.site.efficiency("pp").value
        commands = MINI_BATCH_COMMANDS if self.train else 1
        ideal["dispatch"] = repeats * np.full(len(rows), commands * self.site.dispatch_s)
        return CallPrices(self.site.weigh(ideal), ideal)

    def _micro_batch(self, shares: Shares, ranks: Ranks, last: bool = False) -> dict[str, Floats]:
        """One micro-batch by class: a full one, or the last."""
        like = self if self.spec.head is Head.LM else replace(self, spec=replace(self.spec, head=Head.LM))
        body = like.body(shares, last)
        block, found, at_end = replace(body.block, spec=self.spec), dict(body.seconds), ranks.last.astype(float)
        found["forward"] = found["forward"] + at_end * body.column(block.head_s())
        if "tp" in found and self.spec.head is Head.LM:
            found["tp"] = found["tp"] + at_end * body.column(block.head_tp_s())
        if self.train:
            found["backward"] = found["backward"] + at_end * body.column(block.head_s(backward=True))
        return found

    @lru_cache(maxsize=2)  # noqa: B019  (the key is this frozen pipeline, and few are kept)
    def body(self, shares: Shares, last: bool) -> Body:
        """One micro-batch without the head."""
        size, ranks = np.maximum(shares.rest, 1) if last else shares.size, Ranks.stacked(self.rows, self.spec.layers)
        few, index = _distinct(size, self.rows)
        block = Block(self.spec, self.rows[few], self.site, self._batch(size[few]))
        found: dict[str, Floats] = {}
        body = Body(block, index, found)
        first, exchanged = ranks.first.astype(float), self._exchanged
        found["forward"] = first * body.column(block.embedding_s())
        found["pp"] = self._sent_s(body.column(block.hidden_bytes), ranks)
        if "tp" in exchanged:
            found["tp"] = first * body.column(block.hidden_tp_s())
        for routed, layers in self._layers(ranks):
            passes = block.passes(routed, self.train)
            for name, each in zip(("forward", "backward"), passes, strict=False):
                found[name] = found.get(name, 0.0) + layers * body.column(each.compute)
            for name in exchanged:
                seconds = body.column(sum(getattr(each, name) for each in passes))
                found[name] = found.get(name, 0.0) + layers * seconds
        return body

    @property
    def _exchanged(self) -> tuple[str, ...]:
        """Classes of collectives that some row has."""
        return tuple(name for name in ("tp", "cp", "ep") if (getattr(self.rows, name) > 1).any())

    def _layers(self, ranks: Ranks) -> Iterator[tuple[bool, Ints]]:
        """Whether layers have experts, and how many such layers each rank holds."""
        dense = ranks.dense(self.spec)
        if not self.spec.experts or self.spec.dense_layers:
            yield False, dense
        if self.spec.experts:
            yield True, ranks.layers - dense

    def _batch(self, size: Ints) -> MicroBatch:
        """Padded: to the longest that so many sequences are expected to hold; the head sees their responses alone.

        Packed: every token counts once, attention as for equal sequences whose squares sum to the same.
        """
        prompt, response = self.workload.prompt, self.workload.response
        if self.workload.packed:
            means, variances = zip(moments(prompt), moments(response), strict=True)
            tokens = size.astype(float) * sum(means)
            length = np.full(len(size), sum(means) + sum(variances) / sum(means))
            return MicroBatch(tokens / length, length, tokens)
        sizes, index = np.unique(size, return_inverse=True)
        longest = np.array([padded(response, int(each)) for each in sizes])[index]
        return MicroBatch(size.astype(float), prompt.maximum + longest, size * longest)

    def _sent_s(self, hidden_bytes: Floats, ranks: Ranks) -> Floats:
        """Hidden states to and from neighbours; in training their gradients too."""
        rows = self.rows
        if not (rows.pp > 1).any():
            return np.zeros_like(ranks.layers, dtype=float)
        power = self.site.rates["pp.scatter"]
        links = np.where(rows.sequence_parallel, rows.tp, rows.tp**power if power else 1)
        each_s = by_link(self.site, rows.pp_spans, lambda link: send_s(link, hidden_bytes / links))
        neighbours = (rows.pp > 1) * (2.0 - ranks.first - ranks.last)
        return np.asarray(neighbours * ((1 + self.train) * rows.vpp * each_s))


def _distinct(size: Ints, rows: Rows) -> tuple[Ints, Ints]:
    """Rows of which each has another micro-batch or cuts it otherwise, and for every row its like among them."""
    node = np.where(rows.tp_spans | rows.ep_spans, rows.node, 0)
    return distinct([
        size, rows.tp, rows.cp, rows.ep, rows.recompute, node,
        rows.sequence_parallel, rows.tp_spans, rows.cp_spans, rows.ep_spans,
    ])  # fmt: skip
