"""Seconds of one call on one unit: compute, collectives, bubbles, by operation class (paper §4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.core import Calibration, Candidate, Link, ModelSpec, Work, Workload
from nereus.cost import operations
from nereus.cost.lengths import decode_profile, padded
from nereus.cost.memory import BUCKET_BYTES
from nereus.cost.operations import DISPATCH_S, Rates, Shard, all_reduce_s, send_s

Seconds = Mapping[str, float]
"""Operation class → ideal seconds."""

MINI_BATCH_COMMANDS = 2
"""An update is prepared and then committed (D5.6)."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a unit runs on: the rates of each pp rank's slowest device, and the slowest links of its groups."""

    rates: tuple[Rates, ...]
    tp: Link
    pp: Link
    dp: Link


@dataclass(frozen=True, slots=True)
class CallCost:
    """`seconds` of a call; `ideal` seconds of its busiest device by class, from which efficiencies are learnt."""

    seconds: float
    ideal: Seconds


@dataclass(frozen=True, slots=True)
class CallModel:
    """Prices one kind of work of one model on one unit. `parameters` are the local elements by pp rank."""

    spec: ModelSpec
    candidate: Candidate
    workload: Workload
    site: Site
    calibration: Calibration
    parameters: tuple[int, ...]
    master_bytes: int

    def cost(self, work: Work, rows: int) -> CallCost:
        """The cost of a call whose unit handles `rows` sequences (of one mini-batch, for an update)."""
        match work:
            case Work.GENERATE:
                return self._generate(rows)
            case Work.FORWARD:
                return self._pipeline(rows, train=False)
            case Work.UPDATE:
                return self._pipeline(rows, train=True)

    def weigh(self, ideal: Seconds) -> float:
        """Predicted seconds of ideal ones."""
        return sum(
            seconds / operations.efficiency(self.calibration, name).value for name, seconds in ideal.items() if seconds
        )

    def _shards(self) -> list[Shard]:
        layout = self.candidate.layout
        return [Shard.of(self.spec, layout, pp_rank) for pp_rank in range(layout.pp)]

    def _pipeline(self, rows: int, train: bool) -> CallCost:
        """Micro-batches through the pp ranks: the busiest rank's work plus one micro-batch of each other (1F1B)."""
        size = min(self.candidate.micro_batch, rows)
        full, rest = divmod(rows, size)
        ones: list[dict[str, float]] = []
        totals: list[dict[str, float]] = []
        for pp_rank, shard in enumerate(self._shards()):
            one = self._micro_batch(pp_rank, shard, size, train)
            total = {name: full * seconds for name, seconds in one.items()}
            if rest:
                for name, seconds in self._micro_batch(pp_rank, shard, rest, train).items():
                    total[name] += seconds
            if train:
                total |= self._update(pp_rank, shard)
            ones.append(one)
            totals.append(total)
        weights = [self.weigh(total) for total in totals]
        busiest = weights.index(max(weights))
        bubble_s = sum(self.weigh(one) for pp_rank, one in enumerate(ones) if pp_rank != busiest)
        repeats = self.workload.updates if train else 1
        return self._finish(totals[busiest], bubble_s, repeats, MINI_BATCH_COMMANDS if train else 1)

    def _finish(self, total: Seconds, wait_s: float, repeats: int, commands: int) -> CallCost:
        """A rank waits for its pipeline where it waits for transfers: both are measured as `pp`.

        `wait_s` is predicted time already, so it enters the ideal seconds such that weighing them gives it back.
        """
        ideal = {name: repeats * seconds for name, seconds in total.items() if seconds}
        if wait_s:
            share = operations.efficiency(self.calibration, "pp").value
            ideal["pp"] = ideal.get("pp", 0.0) + repeats * wait_s * share
        ideal["dispatch"] = repeats * commands * DISPATCH_S
        return CallCost(self.weigh(ideal), ideal)

    def _micro_batch(self, pp_rank: int, shard: Shard, rows: int, train: bool) -> dict[str, float]:
        response = padded(self.workload.response, rows)
        length = self.workload.prompt.maximum + response
        rates, layout = self.site.rates[pp_rank], self.candidate.layout
        forward = shard.forward(rows, length, response)
        hidden_bytes = rows * length * shard.hidden * shard.element_bytes
        reduce_s = all_reduce_s(self.site.tp, layout.tp, hidden_bytes)
        neighbours = (pp_rank > 0) + (pp_rank < layout.pp - 1)
        found = {
            "forward": rates.seconds(forward),
            "tp": (2 * shard.layers + shard.first) * reduce_s,
            "pp": neighbours * send_s(self.site.pp, hidden_bytes),
        }
        if shard.last and not shard.scalar_head:
            # Vocabulary-parallel loss: maximum, sum of exponentials, the target's logit.
            found["tp"] += 3 * all_reduce_s(self.site.tp, layout.tp, rows * response * shard.wide_bytes)
        if train:
            again = {"full": 1.0, "selective": 0.2}.get(self.candidate.recompute, 0.0)
            found["backward"] = rates.seconds(forward * (2 + again))
            found["tp"] += (2 + 2 * (again == 1.0)) * shard.layers * reduce_s
            found["pp"] *= 2
        return found

    def _update(self, pp_rank: int, shard: Shard) -> dict[str, float]:
        """Once a mini-batch: gradients summed over replicas in buckets, then Adam."""
        parameters, dp = self.parameters[pp_rank], self.candidate.dp
        gradient_bytes = parameters * self.master_bytes
        buckets = -(-gradient_bytes // BUCKET_BYTES)
        bucket_s = all_reduce_s(self.site.dp, dp, gradient_bytes / buckets)
        optimizer = shard.optimizer(parameters, self.master_bytes)
        return {"dp": buckets * bucket_s, "optimizer": self.site.rates[pp_rank].seconds(optimizer)}

    def _generate(self, rows: int) -> CallCost:
        """Prefill, then one token at a time through all pp ranks in turn, in as many waves as the KV budget asks."""
        wave = min(rows, self.candidate.micro_batch) if self.candidate.kv_bytes > 0 else rows
        waves = -(-rows // wave)
        ranks = [self._generate_rank(pp_rank, shard, wave) for pp_rank, shard in enumerate(self._shards())]
        weights = [self.weigh(rank) for rank in ranks]
        busiest = weights.index(max(weights))
        wait_s = sum(weights) - weights[busiest]
        total = {name: waves * seconds for name, seconds in ranks[busiest].items()}
        return self._finish(total, waves * wait_s, 1, 1)

    def _generate_rank(self, pp_rank: int, shard: Shard, rows: int) -> dict[str, float]:
        rates, layout, prompt = self.site.rates[pp_rank], self.candidate.layout, self.workload.prompt.maximum
        neighbours = (pp_rank > 0) + (pp_rank < layout.pp - 1)
        prompt_bytes = rows * prompt * shard.hidden * shard.element_bytes
        prefill = shard.forward(rows, prompt, response=1)
        reductions = 2 * shard.layers + shard.first
        found = {
            "prefill": rates.seconds(prefill),
            "decode": 0.0,
            "tp": reductions * all_reduce_s(self.site.tp, layout.tp, prompt_bytes),
            "pp": neighbours * send_s(self.site.pp, prompt_bytes),
        }
        begin = 0.0
        for end, live in zip(*decode_profile(self.workload.response, rows), strict=True):
            steps = float(end) - begin
            if steps <= 0:
                continue
            context = prompt + (begin + float(end)) / 2
            hidden_bytes = float(live) * shard.hidden * shard.element_bytes
            found["decode"] += steps * rates.seconds(shard.decode(float(live), context))
            found["tp"] += steps * reductions * all_reduce_s(self.site.tp, layout.tp, hidden_bytes)
            if shard.last and layout.tp > 1:
                gathered = float(live) * shard.vocab * shard.wide_bytes
                found["tp"] += steps * (send_s(self.site.tp, (layout.tp - 1) * gathered) + self.site.tp.latency_s)
            # The sampled token returns to the first pp rank.
            found["pp"] += steps * (
                neighbours * send_s(self.site.pp, hidden_bytes) + (layout.pp > 1) * self.site.pp.latency_s
            )
            begin = float(end)
        return found
