"""Seconds and bytes of one RL step under a plan: the objective and the constraint of the search (paper §4.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus.core import (
    DTYPE_BYTES,
    Assignment,
    Calibration,
    Candidate,
    Cluster,
    Estimate,
    Kind,
    Layout,
    Link,
    Plan,
    Work,
    Workflow,
    Workload,
)
from nereus.core.sizes import show_bytes
from nereus.cost import operations
from nereus.cost.calls import CallCost, CallModel, Site
from nereus.cost.memory import Sizes, master_bytes, transient_bytes
from nereus.cost.operations import TENSORS_PER_LAYER, Rates
from nereus.cost.schedule import SYNC, Timeline, mask, node_order, timeline, turns
from nereus.cost.state import schemas

Units = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest use of one device: what is stored there, and the call that adds most, by term."""

    resident_bytes: int
    call: str
    terms: Mapping[str, int]

    @property
    def transient_bytes(self) -> int:
        """Bytes of the call's terms."""
        return sum(self.terms.values())

    @property
    def bytes(self) -> int:
        """The peak."""
        return self.resident_bytes + self.transient_bytes

    def describe(self) -> str:
        """The call and the term that make the peak, in words."""
        term = max(self.terms, key=self.terms.__getitem__, default="")
        stored = f"{show_bytes(self.resident_bytes)} stored"
        if not self.transient_bytes:
            return stored
        return f"{self.call}: {term} {show_bytes(self.terms[term])} of {show_bytes(self.transient_bytes)}, {stored}"


class StepModel:
    """Predicts a job's step on a cluster. Prices are remembered, so ask one model about many plans."""

    def __init__(
        self, workflow: Workflow, workload: Workload, cluster: Cluster, calibration: Calibration | None = None
    ) -> None:
        self.workflow = workflow
        self.workload = workload
        self.cluster = cluster
        self.calibration = calibration or Calibration()
        self.schemas = schemas(workflow)
        self.order, self.before = node_order(workflow)
        self._sizes = {model_stage: Sizes(schema) for model_stage, schema in self.schemas.items()}
        self._node = {device.id: device.node for device in cluster.devices}
        self._kind = {device.id: cluster.kinds[device.kind] for device in cluster.devices}
        self._costs: dict[tuple[Candidate, Work, int, Site], CallCost] = {}
        self._terms: dict[tuple[Candidate, Work, int], dict[str, int]] = {}

    def estimate(self, plan: Plan) -> Estimate:
        """The predicted step: critical path over calls, peak by device, relative uncertainty."""
        costs = self._plan_costs(plan)
        line = self._timeline(plan, costs)
        peaks = self.peaks(plan)
        return Estimate(
            step_s=line.step_s,
            call_s={name: cost.seconds for name, cost in costs.items()},
            peak_bytes={device: peak.bytes for device, peak in peaks.items()},
            critical_path=line.critical_path,
            uncertainty=self._uncertainty(costs, line),
            limits={device: peak.describe() for device, peak in peaks.items()},
        )

    def breakdown(self, plan: Plan) -> Mapping[str, float]:
        """Ideal seconds of the busiest device of each call, keyed `call:class` as measured timings are."""
        return {
            f"{call}:{name}": seconds
            for call, cost in self._plan_costs(plan).items()
            for name, seconds in cost.ideal.items()
        }

    def call_s(self, plan: Plan) -> Mapping[str, float]:
        """Predicted seconds of each call, and of the weight synchronisation."""
        return {name: cost.seconds for name, cost in self._plan_costs(plan).items()}

    def costs(self, candidate: Candidate, units: Units) -> dict[str, CallCost]:
        """The cost of each call of a placed model-stage: that of its slowest unit."""
        ordered = sorted(units, key=lambda unit: unit[0])
        sites = self._sites(candidate, ordered)
        found: dict[str, CallCost] = {}
        for call in self.workflow.calls_of(candidate.model_stage):
            whole = self.workload.mini_batch if call.work is Work.UPDATE else self.workload.sequences
            small, extra = divmod(whole, candidate.dp)
            # Units on equal sites differ in their share alone, and the first of them has the largest.
            first: dict[Site, int] = {}
            for index, site in enumerate(sites):
                first.setdefault(site, small + (index < extra))
            slowest = max(
                (self._cost(candidate, call.work, rows, site) for site, rows in first.items() if rows),
                key=lambda cost: cost.seconds,
            )
            factor = operations.residual(self.calibration, call.name).value
            found[call.name] = CallCost(slowest.seconds * factor, slowest.ideal)
        return found

    def resident(self, candidate: Candidate) -> tuple[int, ...]:
        """Bytes stored between calls by position in a unit (pp rank, then tp rank)."""
        sizes, layout = self._sizes[candidate.model_stage], candidate.layout
        return tuple(
            sizes.elements(layout, pp_rank, tp_rank) * sizes.schema.element_bytes
            for pp_rank in range(layout.pp)
            for tp_rank in range(layout.tp)
        )

    def transient(self, candidate: Candidate, call: str, pp_rank: int) -> Mapping[str, int]:
        """What a call adds on the devices of a pp rank, by term, scaled by what measured peaks taught."""
        work = self.workflow.call(call).work
        key = (candidate, work, pp_rank)
        if key not in self._terms:
            model_stage = candidate.model_stage
            sizes = self._sizes[model_stage]
            gradients = sizes.elements(candidate.layout, pp_rank, 0) * master_bytes(sizes.schema)
            terms = transient_bytes(self.workflow.spec(model_stage), candidate, self.workload, work, pp_rank, gradients)
            scale = self.calibration.memory_scale
            self._terms[key] = {name: math.ceil(scale * size) for name, size in terms.items()}
        return self._terms[key]

    def peaks(self, plan: Plan) -> dict[int, Peak]:
        """The peak of every device: idle co-residents and the largest transient of any call there (D7.1)."""
        stored = dict.fromkeys(plan.devices, 0)
        largest: dict[int, tuple[int, str, Mapping[str, int]]] = dict.fromkeys(plan.devices, (0, "", {}))
        for assignment in plan.assignments:
            candidate = assignment.candidate
            resident = self.resident(candidate)
            calls = [call.name for call in self.workflow.calls_of(candidate.model_stage)]
            for unit in assignment.units:
                for position, device in enumerate(unit):
                    stored[device] += resident[position]
                    for call in calls:
                        terms = self.transient(candidate, call, position // candidate.layout.tp)
                        size = sum(terms.values())
                        if size > largest[device][0]:
                            largest[device] = (size, call, terms)
        return {device: Peak(stored[device], *largest[device][1:]) for device in sorted(stored)}

    def sync_cost(self, pairs: Sequence[tuple[Assignment, Assignment]]) -> CallCost:
        """Shard-to-shard copies, one (source, target) pair after another: the busiest receiver or sender of each."""
        ideal = sum(self._copy_s(source, target) for source, target in pairs)
        seconds = ideal / operations.efficiency(self.calibration, "sync").value
        return CallCost(seconds * operations.residual(self.calibration, SYNC).value, {"sync": ideal})

    def _plan_costs(self, plan: Plan) -> dict[str, CallCost]:
        found: dict[str, CallCost] = {}
        for assignment in plan.assignments:
            found |= self.costs(assignment.candidate, assignment.units)
        if self.workflow.weight_syncs:
            found[SYNC] = self.sync_cost([(plan.of(a), plan.of(b)) for a, b in self.workflow.weight_syncs])
        return {name: found[name] for name in self.order}

    def _timeline(self, plan: Plan, costs: Mapping[str, CallCost]) -> Timeline:
        devices = {call.name: mask(plan.of(call.model_stage).devices) for call in self.workflow.calls}
        devices[SYNC] = 0
        for model_stage in {model_stage for pair in self.workflow.weight_syncs for model_stage in pair}:
            devices[SYNC] |= mask(plan.of(model_stage).devices)
        waits = turns(self.order, self.before, devices)
        return timeline(self.order, waits, {name: cost.seconds for name, cost in costs.items()})

    def _uncertainty(self, costs: Mapping[str, CallCost], line: Timeline) -> float:
        """Errors of one class go together, those of different classes do not."""
        by_class: dict[str, float] = {}
        for call in line.critical_path:
            factor = operations.residual(self.calibration, call).value
            for name, ideal in costs[call].ideal.items():
                value = operations.efficiency(self.calibration, name).value
                by_class[name] = by_class.get(name, 0.0) + factor * ideal / value
        variance = sum(
            (seconds / line.step_s) ** 2 * operations.efficiency(self.calibration, name).variance
            for name, seconds in by_class.items()
        )
        return math.sqrt(variance)

    def _cost(self, candidate: Candidate, work: Work, rows: int, site: Site) -> CallCost:
        key = (candidate, work, rows, site)
        if key not in self._costs:
            sizes, layout = self._sizes[candidate.model_stage], candidate.layout
            model = CallModel(
                spec=self.workflow.spec(candidate.model_stage),
                candidate=candidate,
                workload=self.workload,
                site=site,
                calibration=self.calibration,
                parameters=tuple(sizes.elements(layout, pp_rank, 0) for pp_rank in range(layout.pp)),
                master_bytes=master_bytes(sizes.schema),
            )
            self._costs[key] = model.cost(work, rows)
        return self._costs[key]

    def _sites(self, candidate: Candidate, units: Sequence[tuple[int, ...]]) -> list[Site]:
        """What each unit runs on. Links count as slow as the slowest group of their kind in the unit."""
        layout, dtype = candidate.layout, self.workflow.spec(candidate.model_stage).dtype
        dp = self._slowest([[unit[position] for unit in units] for position in range(layout.size)])
        found = []
        for unit in units:
            groups = [unit[rank * layout.tp : (rank + 1) * layout.tp] for rank in range(layout.pp)]
            chains = [unit[rank :: layout.tp] for rank in range(layout.tp)]
            rates = tuple(Rates.slowest([self._kind[device] for device in group], dtype) for group in groups)
            found.append(Site(rates, self._slowest(groups), self._slowest(chains), dp))
        return found

    def _slowest(self, groups: Sequence[Sequence[int]]) -> Link:
        across = any(len({self._node[device] for device in group}) > 1 for group in groups)
        return self.cluster.links["inter" if across else "intra"]

    def _copy_s(self, source: Assignment, target: Assignment) -> float:
        """Ideal seconds of one weight synchronisation; a device copies locally what it holds in the same cut."""
        candidate, layout = target.candidate, target.candidate.layout
        sizes, layers = self._sizes[candidate.model_stage], self.schemas[candidate.model_stage].layers
        element_bytes = DTYPE_BYTES[self.schemas[candidate.model_stage].dtypes[Kind.PARAM]]
        held = {device: (source.candidate.layout, p) for unit in source.units for p, device in enumerate(unit)}
        received: dict[int, int] = {}
        for unit in target.units:
            for position, device in enumerate(unit):
                if device not in held or not _covers(*held[device], layout, position, layers):
                    received[device] = sizes.elements(layout, *divmod(position, layout.tp)) * element_bytes
        local_s = max(self.resident(candidate)) / min(self._kind[d].memory_bytes_per_s for d in target.devices)
        if not received:
            return local_s
        across = self._slowest([sorted(source.devices | target.devices)])
        busiest = max(max(received.values()), sum(received.values()) / len(source.devices))
        messages = TENSORS_PER_LAYER * len(layout.layers_of(0, layers))
        return local_s + busiest / across.bytes_per_s + messages * across.latency_s


def _covers(source: Layout, source_position: int, target: Layout, position: int, layers: int) -> bool:
    """Whether a source position holds all that a target position needs, cut alike."""
    if source.tp != target.tp or source_position % source.tp != position % target.tp:
        return False
    has = source.layers_of(source_position // source.tp, layers)
    needs = target.layers_of(position // target.tp, layers)
    same_ends = (source_position < source.tp) == (position < target.tp) and (
        source_position >= source.size - source.tp
    ) == (position >= target.size - target.tp)
    return same_ends and set(needs) <= set(has)
