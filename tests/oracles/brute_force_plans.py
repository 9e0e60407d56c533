"""The best plan by trying everything: every candidate of every model-stage on every set of devices.

Written apart from the planner: it asks the cost model about whole plans alone. Degrees are listed from first
principles, for devices that are all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from nereus.core import Assignment, Candidate, Layout, ModelStage, Plan, Stage, Workflow, Workload
from nereus.cost.memory import sequence_kv_bytes
from nereus.cost.step import StepModel

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Space:
    """The job and what is varied besides layouts and devices."""

    workflow: Workflow
    workload: Workload
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    recompute: tuple[str, ...] = ("none", "full")

    def placed(self, model_stage: ModelStage, pool: Sequence[int]) -> Iterator[Assignment]:
        """Every candidate on every set of devices, units in order."""
        for count in range(1, len(pool) + 1):
            for devices, candidate in product(combinations(pool, count), tuple(self._using(model_stage, count))):
                size = candidate.layout.size
                units = tuple(devices[unit * size : (unit + 1) * size] for unit in range(candidate.dp))
                yield Assignment(candidate, units)

    def _using(self, model_stage: ModelStage, devices: int) -> Iterator[Candidate]:
        """Every candidate that uses exactly `devices` devices."""
        spec = self.workflow.specs[model_stage.model]
        for tp, pp, dp in product(range(1, devices + 1), repeat=3):
            cuts_heads = spec.heads % tp == 0 and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0)
            if tp * pp * dp == devices and cuts_heads and pp <= spec.layers and dp <= self.workload.mini_batch:
                yield from self._sizes(model_stage, Layout(tp, pp), dp)

    def _sizes(self, model_stage: ModelStage, layout: Layout, dp: int) -> Iterator[Candidate]:
        if model_stage.stage is Stage.GENERATION:
            whole = -(-self.workload.sequences // dp)
            yield Candidate(model_stage, layout, dp, whole)
            one_bytes = sequence_kv_bytes(self.workflow.spec(model_stage), layout, self.workload)
            for wave in MICRO_BATCHES:
                if wave < whole:
                    yield Candidate(model_stage, layout, dp, wave, kv_bytes=wave * one_bytes)
            return
        trained = self.workflow.updated(model_stage)
        share = -(-(self.workload.mini_batch if trained else self.workload.sequences) // dp)
        for micro_batch in self.micro_batches:
            for recompute in self.recompute if trained else ("none",):
                if micro_batch <= share:
                    yield Candidate(model_stage, layout, dp, micro_batch, recompute)


def plans(space: Space, pool: Sequence[int]) -> Iterator[Plan]:
    """Every plan."""
    options = [tuple(space.placed(model_stage, pool)) for model_stage in space.workflow.model_stages]
    for assignments in product(*options):
        yield Plan(assignments)


def profile(model: StepModel, space: Space, pool: Sequence[int]) -> list[tuple[float, int]]:
    """(step seconds, bytes of the fullest device) of every plan."""
    found = []
    for plan in plans(space, pool):
        estimate = model.estimate(plan)
        found.append((estimate.step_s, max(estimate.peak_bytes.values())))
    return found
