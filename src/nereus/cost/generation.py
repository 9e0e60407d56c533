"""Seconds of generation: prefill, then one token at a time while the batch shrinks as sequences end (D7.2).

A unit holds as many sequences at once as its KV budget allows. Without a budget that is its whole share. A plain engine
works through the share in waves of `Rows.micro_batch` padded sequences; one that refills (`generation.refill`) gives a
place that comes free to the next sequence, so that the batch shrinks only at the end, and its budget counts in tokens.
Such an engine admits a sequence when its prompt fits: one that had to wait is expected to be preempted once, and to be
computed again as far as it had come.
A token passes all pp ranks in turn: at any time one of them works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from nereus.core import ModelSpec, Workload
from nereus.cost.collectives import by_link, send_s
from nereus.cost.decoding import Engine, Parts
from nereus.cost.held import split_layers
from nereus.cost.lengths import GROUPS, segments
from nereus.cost.prices import CallPrices
from nereus.cost.ranks import Ranks
from nereus.cost.rows import Bools, Floats, Ints, Rows, distinct
from nereus.cost.site import Site
from nereus.cost.windows import cached_tokens

Seconds = Mapping[str, Floats]
"""Operation class → ideal seconds by row."""


def generate(spec: ModelSpec, rows: Rows, workload: Workload, site: Site) -> CallPrices:
    """The generation of a whole step's batch on the unit with the largest share."""
    live, alike, where = _alike(Engine(spec, rows, site), workload)
    wave = _Wave(Engine(spec, rows[alike], site), workload)
    share = -(-workload.sequences // rows.dp)
    prefill, decode, between_s = wave.price(live[alike], share[alike].astype(float))
    ranks, total = Ranks.stacked(rows, spec.layers), dict[str, Floats]()
    for name, parts in (("prefill", prefill[where]), ("decode", decode[where])):
        for key, seconds in _ranks_s(name, parts, ranks, spec, rows, site).items():
            total[key] = total[key] + seconds if key in total else seconds
    return _turns(site, ranks, total, site.dispatch_s + between_s[where])


@dataclass(frozen=True, slots=True)
class _Wave:
    """All passes of one share on one unit, summed."""

    engine: Engine
    workload: Workload

    def price(self, live: Floats, share: Floats) -> tuple[Parts, Parts, Floats]:
        """Prefill, decode steps, and seconds between steps; `live` sequences of `share` at once."""
        few, where = distinct([live.astype(np.int64), *_groups(self.engine.rows)])
        once, engine = live[few], replace(self.engine, rows=self.engine.rows[few])
        if self.engine["generation.refill"] == 0:
            prompt, waves = self.workload.prompt.maximum, np.ceil(share / live)
            decode, between_s, _ = self._shrinking(engine, once, prompt)
            return (
                engine.prefill(once, prompt)[where].times(waves),
                decode[where].times(waves),
                between_s[where] * waves,
            )
        prompt, again = self.workload.prompt.mean, share / live - 1
        cached, steps = prompt + _occupied(self.workload), again * self.workload.response.mean
        prefills = engine.prefill(once, np.array([[prompt], [cached]]))
        decode, between_s, full = self._shrinking(engine, once, prompt, cached)
        return (
            prefills[:, where].times(np.array([again + 1, again])).summed(),
            decode[where] + full[where].times(steps),
            between_s[where] + steps * engine.between_s(once)[where],
        )

    def _shrinking(
        self, engine: Engine, live: Floats, prompt: float, cached: float = 0.0
    ) -> tuple[Parts, Floats, Parts]:
        """Decode steps and seconds between them while the last `live` sequences end.

        With them one step of all that are live, each with `cached` tokens.
        """
        steps, ends, alive = segments(self.workload.response, live)
        context = np.concatenate([prompt + ends - steps / 2, np.full((1, len(live)), cached)])
        parts = engine.step(np.concatenate([alive, live[None]]), context)
        return parts[:-1].times(steps).summed(), (steps * engine.between_s(alive)).sum(axis=0), parts[-1]


def _alike(engine: Engine, workload: Workload) -> tuple[Floats, Ints, Ints]:
    """Sequences at once by row; one row of each set that decodes alike, and to which set each row belongs."""
    rows, share = engine.rows, -(-workload.sequences // engine.rows.dp)
    live = np.where(rows.kv_bytes > 0, np.minimum(share, rows.micro_batch), share)
    if engine["generation.refill"] > 0:
        tokens = cached_tokens(engine.spec, workload.prompt.mean + _occupied(workload))
        held = rows.kv_bytes / (engine.token_bytes * tokens)
        live = np.where(rows.kv_bytes > 0, np.clip(np.floor(held), 1, share), share)
    return (live.astype(float), *distinct([live.astype(np.int64), share, *_groups(rows)]))


def _groups(rows: Rows) -> list[Ints | Bools]:
    """What of a row decides on how fast its tp and ep groups decode."""
    node = np.where(rows.tp_spans | rows.ep_spans, rows.node, 0)
    return [rows.tp, rows.cp, rows.ep, node, rows.tp_spans, rows.ep_spans, rows.sequence_parallel]


@lru_cache(maxsize=64)
def _occupied(workload: Workload) -> float:
    """Response tokens that a live sequence holds on average: long ones live longer."""
    _, ends, alive = segments(workload.response, np.array([float(GROUPS)]))
    steps = np.diff(ends, axis=0, prepend=0.0)
    return float((steps * alive * (ends - steps / 2)).sum() / max((steps * alive).sum(), 1.0))


def _ranks_s(name: str, parts: Parts, ranks: Ranks, spec: ModelSpec, rows: Rows, site: Site) -> Seconds:
    """What each pp rank (first axis) does in all passes together."""
    dense, routed = split_layers(spec, ranks)
    first, last = ranks.first.astype(float), ranks.last.astype(float)
    busy_s, pairs = dense * parts.dense + first * parts.embed + last * parts.head, 2.0 * dense
    found = {}
    if spec.experts:
        busy_s = busy_s + routed * parts.routed
        pairs = pairs + np.where(rows.ep > 1, 1 + (spec.shared_experts > 0), 2) * routed
        found["ep"] = routed * parts.exchange
    found[name] = busy_s
    found["tp"] = (pairs + first) * parts.reduce + last * parts.gather
    # Each rank but the last sends on in every pass; the last returns the chosen token to the first.
    onward_s = by_link(
        site,
        rows.pp_spans,
        lambda link: send_s(link, parts.hidden_bytes) + (parts.messages - 1) * link.latency_s,
    )
    returned_s = by_link(site, rows.pp_spans, lambda link: parts.messages * link.latency_s)
    sent_s = np.where(ranks.last, returned_s if name == "decode" else 0.0, onward_s)
    found["pp"] = np.where(rows.pp > 1, sent_s, 0.0)
    return found


def _turns(site: Site, ranks: Ranks, total: Seconds, dispatch_s: Floats) -> CallPrices:
    """The busiest pp rank, which waits while the others take their turn; that wait counts as `pp`."""
    weights = site.weigh(total)
    busiest = ranks.busiest(weights)
    wait_s = (ranks.count * weights).sum(axis=0) - weights.take(busiest)
    ideal = {key: seconds.take(busiest) for key, seconds in total.items()}
    ideal["pp"] = ideal["pp"] + wait_s * site.efficiency("pp").value
    kept = {key: seconds for key, seconds in (ideal | {"dispatch": dispatch_s}).items() if seconds.any()}
    return CallPrices(site.weigh(kept), kept)
