"""Seconds and bytes of one RL step: the objective and the constraint of the search (paper §4.2).

`price` answers for many candidates of one model-stage at once, the rest for a whole plan; both compose the same prices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from nereus.core import (
    Assignment,
    Calibration,
    Call,
    Candidate,
    Cluster,
    DeviceKind,
    Estimate,
    ModelStage,
    Plan,
    Work,
    Workflow,
    Workload,
)
from nereus.cost import generation, operations, sync, training
from nereus.cost.kernels import Rates
from nereus.cost.memory import Memory, Terms
from nereus.cost.peaks import Footprint, Peak, peaks
from nereus.cost.prices import CallPrices, Prices
from nereus.cost.ranks import Ranks
from nereus.cost.rows import Bools, Floats, Ints, Rows
from nereus.cost.schedule import SYNC, Timeline, node_order, timeline, waits
from nereus.cost.site import FITTED, Site

UNMODELLED = 0.15
"""Relative deviation of a step of which no job has measured anything, beside those of its classes: what frameworks do
that no class stands for. Published steps that nothing was fitted to are missed by about so much: 12 % is the median of
NeMo RL's (benchmarks/planner/rl_rows.py), 10 to 18 % of configurations left out of a fit (fit_rows.py)."""

PRICE = {Work.GENERATE: generation.generate, Work.FORWARD: training.forward, Work.UPDATE: training.update}


@dataclass(frozen=True, slots=True)
class CallCost:
    """`seconds` of a call; of its busiest device by class the `ideal` seconds and those that are predicted.

    From the ideal ones efficiencies are learnt; the predicted ones add up to `seconds`.
    """

    seconds: float
    ideal: Mapping[str, float]
    class_s: Mapping[str, float]

    def __add__(self, other: CallCost) -> CallCost:
        return CallCost(
            self.seconds + other.seconds, _merged(self.ideal, other.ideal), _merged(self.class_s, other.class_s)
        )


class StepModel:
    """Predicts a job's step on a cluster. What model-stages cost is remembered, so ask one model about many plans."""

    def __init__(
        self, workflow: Workflow, workload: Workload, cluster: Cluster, calibration: Calibration | None = None
    ) -> None:
        self.workflow = workflow
        self.workload = workload
        self.cluster = cluster
        self.calibration = calibration or Calibration()
        self.order, self.before = node_order(workflow)
        self._all_kinds = frozenset(device.kind for device in cluster.devices)
        self._sites: dict[tuple[frozenset[str], str], Site] = {}
        self._costs: dict[object, dict[str, CallCost]] = {}
        self._footprints: dict[object, tuple[Footprint, ...]] = {}

    def price(self, model_stage: ModelStage, rows: Rows, kinds: str | Collection[str], precision: str = "") -> Prices:
        """What every row costs on devices of one kind, or on several kinds at the pace of the slowest.

        `precision` is that of the matrix products; empty means what the workflow says.
        """
        names = frozenset({kinds} if isinstance(kinds, str) else kinds)
        site = self._site(names, precision or self.workflow.precision(model_stage))
        found = self._priced(model_stage, rows, site)
        sync_s = found.pop(SYNC).seconds
        resident, transient = self._memory(model_stage, rows, names)
        return Prices({name: price.seconds for name, price in found.items()}, sync_s, resident, transient)

    def estimate(self, plan: Plan) -> Estimate:
        """The predicted step: critical path over calls, peak by device, relative uncertainty."""
        costs, found = self._plan_costs(plan), peaks(plan, self.footprints)
        line = self._timeline(plan, costs)
        return Estimate(
            step_s=line.step_s,
            call_s={name: cost.seconds for name, cost in costs.items()},
            peak_bytes=found.each(lambda peak: peak.bytes),
            critical_path=line.critical_path,
            uncertainty=self._uncertainty(costs, line),
            limits=found.each(Peak.describe),
        )

    def timeline(self, plan: Plan) -> Timeline:
        """When each call of a plan ends."""
        return self._timeline(plan, self._plan_costs(plan))

    def breakdown(self, plan: Plan) -> Mapping[str, float]:
        """Ideal seconds of the busiest device of each call, keyed `call:class` as measured timings are."""
        return {
            f"{call}:{name}": seconds
            for call, cost in self._plan_costs(plan).items()
            for name, seconds in cost.ideal.items()
            if seconds
        }

    def call_s(self, plan: Plan) -> Mapping[str, float]:
        """Predicted seconds of each call, and of the weight synchronisation."""
        return {name: cost.seconds for name, cost in self._plan_costs(plan).items()}

    def class_s(self, plan: Plan) -> dict[str, float]:
        """Predicted seconds on the critical path by operation class; together they are the step."""
        costs = self._plan_costs(plan)
        return _by_class(costs, self._timeline(plan, costs))

    def variance(self, name: str) -> float:
        """Of the logarithm of a class's efficiency, on the kind of device about which least is known."""
        dtypes = {spec.dtype for spec in self.workflow.specs.values()}
        sites = [self._site(frozenset({kind}), dtype) for kind in self._all_kinds for dtype in dtypes]
        return max((site.efficiency(name).variance for site in sites), default=operations.START_VARIANCE)

    def peaks(self, plan: Plan) -> dict[int, Peak]:
        """The peak of every device (D7.1)."""
        return peaks(plan, self.footprints).each(lambda peak: peak)

    def costs(self, assignment: Assignment) -> Mapping[str, CallCost]:
        """The cost of each call of a placed model-stage, and under `sync` its part of the weight synchronisation."""
        candidate, spec = assignment.candidate, self.workflow.spec(assignment.candidate.model_stage)
        rows, kinds = Rows.placed(assignment, spec.layers, self._nodes_of(assignment)), self._kinds(assignment)
        key = (candidate, kinds, *rows.groups(0))
        if key not in self._costs:
            site = self._site(kinds, candidate.precision or self.workflow.precision(candidate.model_stage))
            priced = self._priced(candidate.model_stage, rows, site)
            self._costs[key] = {name: self._cost(name, price, site) for name, price in priced.items()}
        return self._costs[key]

    def footprints(self, assignment: Assignment) -> tuple[Footprint, ...]:
        """What each pp rank of a placed model-stage stores and what its calls add, scaled by what peaks taught."""
        candidate, kinds = assignment.candidate, self._kinds(assignment)
        if (candidate, kinds) not in self._footprints:
            by_kind = [self._footprint(candidate, memory) for memory in self._memories(candidate.model_stage, kinds)]
            self._footprints[candidate, kinds] = tuple(
                max(each, key=lambda footprint: footprint.bytes) for each in zip(*by_kind, strict=True)
            )
        return self._footprints[candidate, kinds]

    def _footprint(self, candidate: Candidate, memory: Memory) -> list[Footprint]:
        layers, pp = memory.spec.layers, candidate.layout.pp
        rows, ranks = Rows.of([candidate], layers, node_size=1), Ranks.every(candidate.layout, layers)
        load = memory.at(rows, ranks)
        stored = np.broadcast_to(_total(load.resident), pp)
        calls = {
            call.name: {
                name: np.broadcast_to(size, pp) for name, size in self._scaled(load.transient(call.work)).items()
            }
            for call in self.workflow.calls_of(candidate.model_stage)
        }
        return [
            Footprint(
                int(stored[rank]),
                {call: {name: int(size[rank]) for name, size in terms.items()} for call, terms in calls.items()},
            )
            for rank in range(pp)
        ]

    def _plan_costs(self, plan: Plan) -> dict[str, CallCost]:
        found: dict[str, CallCost] = {}
        for assignment in plan.assignments:
            for name, cost in self.costs(assignment).items():
                found[name] = found[name] + cost if name in found else cost
        return {name: found[name] for name in self.order}

    def _cost(self, name: str, price: CallPrices, site: Site) -> CallCost:
        """The price of a single row, by class."""
        factor = operations.residual(self.calibration, name).value
        ideal = {each: float(seconds[0]) for each, seconds in price.ideal.items() if seconds[0]}
        class_s = {each: factor * seconds / site.efficiency(each).value for each, seconds in ideal.items()}
        return CallCost(float(price.seconds[0]), ideal, class_s)

    def _priced(self, model_stage: ModelStage, rows: Rows, site: Site) -> dict[str, CallPrices]:
        """Every call of a model-stage and its part of the synchronisation, offload and residuals included."""
        spec, calls = self.workflow.spec(model_stage), self.workflow.calls_of(model_stage)
        by_work = {work: PRICE[work](spec, rows, self.workload, site) for work in {call.work for call in calls}}
        ideal = {call.name: dict(by_work[call.work].ideal) for call in calls}
        seconds = {call.name: by_work[call.work].seconds for call in calls}
        if rows.offload.any():
            for call in calls:
                moved = {"offload": self._offload_s(call, rows, site)}
                ideal[call.name] |= moved
                seconds[call.name] = seconds[call.name] + site.weigh(moved)
        ideal[SYNC] = {"sync": self._sync_s(model_stage, rows, site)}
        seconds[SYNC] = site.weigh(ideal[SYNC])
        factors = {name: operations.residual(self.calibration, name).value for name in seconds}
        return {name: CallPrices(factors[name] * each, ideal[name]) for name, each in seconds.items()}

    def _offload_s(self, call: Call, rows: Rows, site: Site) -> Floats:
        """Ideal seconds to fetch what a call of an offloaded model-stage needs from host memory and to put it back.

        Where nothing is updated the host's copy stays good: its parameters are fetched alone.
        """
        spec, trained = self.workflow.spec(call.model_stage), self.workflow.updated(call.model_stage)
        stored = Memory(spec, trained, self.workload, site.kinds[0]).stored(rows, Ranks.stacked(rows, spec.layers))
        rate, fetch = site.host_bytes_per_s, site.rates["offload.fetch"]
        moved = (1 + 1 / fetch) * _total(stored) if call.work is Work.UPDATE else stored["parameters"] / fetch
        return np.where(rows.offload, moved.max(axis=0) / rate if rate else np.inf, 0.0)

    def _sync_s(self, model_stage: ModelStage, rows: Rows, site: Site) -> Floats:
        """Ideal seconds of the model-stage's part of every weight synchronisation."""
        spec, total_s = self.workflow.spec(model_stage), np.zeros(len(rows))
        for source, target in self.workflow.weight_syncs:
            if model_stage == source:
                total_s = total_s + sync.send_s(spec, rows, site)
            if model_stage == target:
                total_s = total_s + sync.receive_s(spec, rows, site)
        return total_s

    def rank_memory(self, model_stage: ModelStage, rows: Rows, kinds: Collection[str]) -> tuple[Floats, Floats, Bools]:
        """Resident and transient bytes by pp rank (first axis) and row, and which of them there are.

        The first and the last rank, and between them one that uses no more than any real one.
        """
        ranks = Ranks.emptiest(rows, self.workflow.spec(model_stage).layers)
        return *self._by_rank(model_stage, rows, ranks, frozenset(kinds)), ranks.count > 0

    def _memory(self, model_stage: ModelStage, rows: Rows, names: frozenset[str]) -> tuple[Floats, Floats]:
        """Resident and transient bytes of the fullest pp rank of every row."""
        ranks = Ranks.stacked(rows, self.workflow.spec(model_stage).layers)
        resident, transient = self._by_rank(model_stage, rows, ranks, names)
        return resident.max(axis=0), transient.max(axis=0)

    def _by_rank(
        self, model_stage: ModelStage, rows: Rows, ranks: Ranks, names: frozenset[str]
    ) -> tuple[Floats, Floats]:
        """Resident and transient bytes by rank (first axis) and row."""
        works = {call.work for call in self.workflow.calls_of(model_stage)}
        loads = [memory.at(rows, ranks) for memory in self._memories(model_stage, names)]
        resident = [_total(load.resident) for load in loads]
        transient = [_total(self._scaled(load.transient(work))) for load in loads for work in works]
        return np.maximum.reduce(resident), np.maximum.reduce(transient)

    def _memories(self, model_stage: ModelStage, kinds: frozenset[str]) -> list[Memory]:
        spec, trained = self.workflow.spec(model_stage), self.workflow.updated(model_stage)
        return [Memory(spec, trained, self.workload, kind) for kind in self._chosen(kinds)]

    def _scaled(self, terms: Terms) -> dict[str, Floats]:
        scale = self.calibration.memory_scale
        return {name: np.ceil(scale * size if scale != 1.0 else size) for name, size in terms.items()}

    def _timeline(self, plan: Plan, costs: Mapping[str, CallCost]) -> Timeline:
        seconds = {name: cost.seconds for name, cost in costs.items()}
        return timeline(self.order, waits(self.workflow, plan), seconds)

    def _uncertainty(self, costs: Mapping[str, CallCost], line: Timeline) -> float:
        """Errors of one class go together, those of different classes do not; all have what no class stands for.

        Classes of kinds that were not fitted carry wide variances of their own.
        """
        shares = {name: seconds / line.step_s for name, seconds in _by_class(costs, line).items()}
        fitted = all(FITTED in self.cluster.kinds[name].constants for name in self._all_kinds)
        unseen = sum(share for name, share in shares.items() if name not in self.calibration.efficiency)
        variance = sum(share * share * self.variance(name) for name, share in shares.items())
        return math.sqrt(variance + (fitted * UNMODELLED * unseen) ** 2)

    def _nodes_of(self, assignment: Assignment) -> Ints:
        """The node of every device, unit by unit."""
        devices = np.fromiter(chain.from_iterable(assignment.units), dtype=np.int64)
        ids, nodes = self._by_id
        index = np.minimum(np.searchsorted(ids, devices), len(ids) - 1)
        if (ids[index] != devices).any():
            raise KeyError(f"{assignment.candidate.model_stage} is placed on devices that the cluster does not have")
        return np.asarray(nodes[index])

    @cached_property
    def _by_id(self) -> tuple[Ints, Ints]:
        """Device ids in order, and the node of each."""
        ids, nodes = np.array([(device.id, device.node) for device in self.cluster.devices], dtype=np.int64).T
        order = np.argsort(ids)
        return ids[order], nodes[order]

    @cached_property
    def _kind(self) -> dict[int, str]:
        return {device.id: device.kind for device in self.cluster.devices}

    def _kinds(self, assignment: Assignment) -> frozenset[str]:
        if len(self._all_kinds) == 1:
            return self._all_kinds
        return frozenset(self._kind[device] for unit in assignment.units for device in unit)

    def _site(self, kinds: frozenset[str], precision: str) -> Site:
        key = (kinds, precision)
        if key not in self._sites:
            chosen, links = self._chosen(kinds), self.cluster.links
            rates = Rates.slowest(chosen, precision)
            self._sites[key] = Site(rates, links["intra"], links["inter"], self.calibration, chosen)
        return self._sites[key]

    def _chosen(self, kinds: frozenset[str]) -> tuple[DeviceKind, ...]:
        return tuple(self.cluster.kinds[name] for name in sorted(kinds))


def _by_class(costs: Mapping[str, CallCost], line: Timeline) -> dict[str, float]:
    found: dict[str, float] = {}
    for call in line.critical_path:
        found = _merged(found, costs[call].class_s)
    return found


def _total(terms: Terms) -> Floats:
    return np.asarray(sum(terms.values()))


def _merged(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in (*one, *(other.keys() - one.keys()))}
