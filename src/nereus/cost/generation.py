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

from nereus.core import Lengths, ModelSpec, Workload
from nereus.cost.collectives import by_link, send_s
from nereus.cost.decoding import Engine, Parts
from nereus.cost.held import split_layers
from nereus.cost.lengths import GROUPS, decode_profile
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
    ranks = Ranks.ends(rows, spec.layers)
    prefill, decode, dispatch_s = prefill[where], decode[where], site.dispatch_s + between_s[where]
    totals = []
    for rank in ranks:
        total = {"dispatch": dispatch_s}
        for name, parts in (("prefill", prefill), ("decode", decode)):
            for key, seconds in _rank_s(name, parts, rank, spec, rows, site).items():
                total[key] = total.get(key, 0.0) + seconds
        totals.append(total)
    return _turns(site, ranks, totals)


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
            decode, between_s = self._shrinking(engine, once, prompt)
            return (
                engine.prefill(once, prompt)[where].times(waves),
                decode[where].times(waves),
                between_s[where] * waves,
            )
        prompt, again = self.workload.prompt.mean, share / live - 1
        cached, steps = prompt + _occupied(self.workload), again * self.workload.response.mean
        prefill, resumed = engine.prefill(once, prompt), engine.prefill(once, np.array(cached))
        decode, between_s = self._shrinking(engine, once, prompt)
        full = engine.step(once, np.full(len(once), cached))
        return (
            prefill[where].times(again + 1) + resumed[where].times(again),
            decode[where] + full[where].times(steps),
            between_s[where] + steps * engine.between_s(once)[where],
        )

    def _shrinking(self, engine: Engine, live: Floats, prompt: float) -> tuple[Parts, Floats]:
        """Decode steps and seconds between them while the last `live` sequences end."""
        steps, ends, alive = segments(self.workload, live)
        parts = engine.step(alive, prompt + ends - steps / 2)
        return parts.times(steps).summed(), (steps * engine.between_s(alive)).sum(axis=0)


def segments(workload: Workload, live: Floats) -> tuple[Floats, Floats, Floats]:
    """(steps, ends, alive), each [segment, row]: decode steps, the token count they reach, sequences still alive."""
    counts, index = np.unique(live.astype(np.int64), return_inverse=True)
    groups = np.minimum(counts, GROUPS)
    ends = np.array([_ends(workload.response, int(group)) for group in groups]).T
    position = np.arange(GROUPS)[:, None]
    alive = np.ceil(counts * np.maximum(1.0 - position / groups, 0.0))
    steps = np.diff(ends, axis=0, prepend=0.0)
    return steps[:, index], ends[:, index], alive[:, index]


@lru_cache(maxsize=1024)
def _ends(response: Lengths, groups: int) -> Floats:
    """Where each of so many groups of equal size ends, the longest repeated up to `GROUPS`."""
    ends, _ = decode_profile(response, groups)
    return np.concatenate([ends, np.full(GROUPS - groups, ends[-1])])


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
    _, ends, alive = segments(workload, np.array([float(GROUPS)]))
    steps = np.diff(ends, axis=0, prepend=0.0)
    return float((steps * alive * (ends - steps / 2)).sum() / max((steps * alive).sum(), 1.0))


def _rank_s(name: str, parts: Parts, rank: Ranks, spec: ModelSpec, rows: Rows, site: Site) -> Seconds:
    """What one pp rank does in all passes together."""
    dense, routed = split_layers(spec, rank)
    # Each rank but the last sends on in every pass; the last returns the chosen token to the first.
    several = rows.pp > 1
    onward, returns = several & ~rank.last, several & rank.last & (name == "decode")
    sent_s = by_link(
        site,
        rows.pp_spans,
        lambda link: (
            onward * (send_s(link, parts.hidden_bytes) + (parts.messages - 1) * link.latency_s)
            + returns * parts.messages * link.latency_s
        ),
    )
    pairs = 2 * dense + np.where(rows.ep > 1, 1 + (spec.shared_experts > 0), 2) * routed
    return {
        name: dense * parts.dense + routed * parts.routed + rank.first * parts.embed + rank.last * parts.head,
        "tp": (pairs + rank.first) * parts.reduce + rank.last * parts.gather,
        "ep": np.asarray(routed * parts.exchange, dtype=float),
        "pp": np.asarray(sent_s, dtype=float),
    }


def _turns(site: Site, ranks: tuple[Ranks, ...], totals: list[dict[str, Floats]]) -> CallPrices:
    """The busiest pp rank, which waits while the others take their turn; that wait counts as `pp`."""
    counts = np.array([rank.count for rank in ranks])
    own = [{key: seconds for key, seconds in total.items() if key != "dispatch"} for total in totals]
    weights = np.array([site.weigh(total) for total in own])
    busiest = np.argmax(np.where(counts > 0, weights, -1.0), axis=0)
    wait_s = (counts * weights).sum(axis=0) - np.choose(busiest, weights)
    ideal = {key: np.choose(busiest, [total[key] for total in totals]) for key in totals[0]}
    ideal["pp"] = ideal["pp"] + wait_s * site.efficiency("pp").value
    kept = {key: seconds for key, seconds in ideal.items() if seconds.any()}
    return CallPrices(site.weigh(kept), kept)
