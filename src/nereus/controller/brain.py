"""The controller's pure half: what drifted, what could be done about it, whether to do it, what was learnt.

Owns no thread, no clock and no tensor; the same state and observation always give the same decision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from nereus.controller import monitor
from nereus.controller.choose import choose
from nereus.controller.monitor import Thresholds
from nereus.controller.outlook import Outlook
from nereus.core import (
    Adapt,
    Assignment,
    Calibration,
    Capabilities,
    Cluster,
    ControllerState,
    Decision,
    EMUSet,
    Estimate,
    Horizon,
    ModelStage,
    Observation,
    Options,
    Outcome,
    Plan,
    StateSchema,
    Trigger,
    Workflow,
    Workload,
    expand,
)
from nereus.core.ports import AdmissionRule
from nereus.cost import calibrate
from nereus.cost.step import StepModel

BIAS_WEIGHT = 0.5
"""Weight of the newest step in the moving average of measured over predicted step time."""
BIAS, PREDICTED_S, TRANSITION_S, PAYBACK_STEPS = "bias", "predicted_step_s", "transition_s", "payback_steps"
OF_ONE_STEP = (PREDICTED_S, TRANSITION_S, PAYBACK_STEPS)


@dataclass(frozen=True, slots=True)
class Brain:
    """Decides for one job. `candidates` is how many of the fastest plans are looked at in every replan."""

    workflow: Workflow
    capabilities: Capabilities
    schemas: Mapping[ModelStage, StateSchema]
    rule: AdmissionRule
    thresholds: Thresholds = field(default_factory=Thresholds)
    headroom: float = 0.1
    candidates: int = 8

    def start(
        self,
        cluster: Cluster,
        workload: Workload,
        ready: Collection[int] | None = None,
        plan: Plan | None = None,
        calibration: Calibration | None = None,
    ) -> ControllerState:
        """The state before the first step, under `plan` or else the fastest one that fits.

        `cluster` holds every device that may ever be there, `ready` those that are there now (None: all), `calibration`
        what an earlier run learnt. Raises InfeasibleError when nothing fits.
        """
        now = cluster if ready is None else cluster.only(ready)
        known = calibration or Calibration()
        chosen = plan or self._outlook(now, workload, known).fastest()
        values = {monitor.LENGTH: workload.response.mean, monitor.DEVICES: float(len(now.ids))}
        state = ControllerState(
            chosen, expand(chosen), cluster, now, workload, calibration=known, values=values, references=values
        )
        return replace(state, estimate=self._estimate(state))

    def take_in(self, state: ControllerState, seen: Observation) -> tuple[ControllerState, tuple[Trigger, ...]]:
        """Learn from what was measured, then compare the present with the last replan."""
        usable, alive = seen.devices - seen.departing, seen.devices | seen.departing
        here = replace(state, workload=_workload(state.workload, seen))
        learnt, values = self._learn(here, seen, self._outlook(state.pool, here.workload, state.calibration).model)
        estimate = self._estimate(learnt)
        saw = monitor.watch(replace(state, values=values), seen, estimate, self.thresholds, self.headroom)
        horizons = {
            name: state.horizons.get(name, Horizon()).crossed(seen.boundary.step)
            if name in saw.crossed
            else state.horizons[name]
            for name in sorted(saw.crossed | set(state.horizons))
        }
        after = replace(
            learnt,
            units=state.units.without_devices(state.units.devices - alive),
            cluster=state.pool.only(usable),
            departing=seen.departing,
            values=saw.values,
            horizons=horizons,
            estimate=estimate,
            last=seen,
        )
        return after, saw.triggers

    def propose(self, state: ControllerState) -> Options:
        """The fastest plans that fit what is there now, each with its way there and what it saves."""
        pressure = state.values.get(monitor.PRESSURE, 1.0)
        calibration = replace(state.calibration, memory_scale=state.calibration.memory_scale * pressure)
        outlook = self._outlook(state.cluster, state.workload, calibration)
        calm = state.last is None or state.last.out_of_memory is None
        fits = state.values.get(monitor.MEMORY, 0.0) <= self.thresholds.memory
        stands = state.plan.devices <= frozenset(state.cluster.ids)
        whole = state.units.same_units(expand(state.plan))
        # Savings count against what would go on running: the current plan without the units that lose a device.
        baseline = remaining(state.plan, frozenset(state.cluster.ids)) or state.plan
        found = outlook.options(state, baseline)
        return replace(found, current=state.estimate if calm and fits and stands and whole else None)

    def decide(self, state: ControllerState, triggers: Sequence[Trigger], options: Options) -> Decision:
        """Keep, adapt or restart, with the arithmetic."""
        step = state.last.boundary.step if state.last is not None else 0
        return choose(state, triggers, options, self.rule, step)

    def rebase(self, state: ControllerState, triggers: Sequence[Trigger]) -> ControllerState:  # noqa: ARG002
        """Every signal's reference becomes its present value, whatever was decided and whichever signal fired."""
        present = {name: state.values[name] for name in monitor.SIGNALS if name in state.values}
        return replace(state, references={**state.references, **present})

    def settle(self, state: ControllerState, decision: Adapt, outcome: Outcome) -> ControllerState:
        """Take over what exists now. What the transition cost is learnt with the first step after it."""
        values = monitor.without_trend(state.values) | {TRANSITION_S: outcome.seconds}
        if isfinite(decision.payback.steps):
            values[PAYBACK_STEPS] = decision.payback.steps
        references = {name: value for name, value in state.references.items() if name != monitor.MEMORY}
        after = replace(state, units=outcome.units, values=values, references=references, pending_transition_s=None)
        if not outcome.completed:
            return after
        proposal = decision.proposal
        moved = not proposal.dag.idle and outcome.seconds > 0
        ideal_s = self._outlook(state.pool, state.workload, state.calibration).transition_ideal_s(proposal.dag)
        return replace(
            after,
            plan=proposal.plan,
            estimate=proposal.estimate,
            pending_transition_s=ideal_s if moved else None,
        )

    def begin(self, state: ControllerState, plan: Plan, units: EMUSet) -> ControllerState:
        """The state after a restart under `plan`; what was learnt about costs is kept."""
        after = replace(
            state, plan=plan, units=units, values=monitor.without_trend(state.values), pending_transition_s=None
        )
        return replace(after, estimate=self._estimate(after))

    def _learn(
        self, state: ControllerState, seen: Observation, model: StepModel
    ) -> tuple[ControllerState, dict[str, float]]:
        """Calibrate; `model` does not know this observation, so the error of its prediction is an honest one."""
        before = state.last
        broken = seen.out_of_memory is not None or (before is not None and before.out_of_memory is not None)
        # A step that ran out of memory, and the rest of it afterwards, have whole peaks but only parts of their times.
        facts = replace(seen, timings={}, call_s={}, step_s=None) if broken else seen
        predicted = model.estimate(state.plan)
        calibration = calibrate.learn(model, state.plan, facts)
        if facts.step_s is None:
            return replace(state, calibration=calibration), dict(state.values)
        values = {name: value for name, value in state.values.items() if name not in OF_ONE_STEP}
        values[PREDICTED_S] = predicted.step_s
        bias, ratio = values.get(BIAS), facts.step_s / predicted.step_s
        if state.pending_transition_s is None:
            values[BIAS] = ratio if bias is None else bias + BIAS_WEIGHT * (ratio - bias)
        else:
            # What the first step takes beyond the usual belongs to the transition (D7.6).
            excess_s = max(0.0, facts.step_s - (bias or 1.0) * predicted.step_s)
            took_s = state.values[TRANSITION_S] + excess_s
            calibration = calibrate.update_transition(calibration, state.pending_transition_s, took_s)
        return replace(state, calibration=calibration, pending_transition_s=None), values

    def _estimate(self, state: ControllerState) -> Estimate:
        return self._outlook(state.pool, state.workload, state.calibration).estimate(state.plan)

    def _outlook(self, cluster: Cluster, workload: Workload, calibration: Calibration) -> Outlook:
        return Outlook(
            self.workflow,
            self.capabilities,
            self.schemas,
            cluster,
            workload,
            calibration,
            self.headroom,
            self.candidates,
        )


def _workload(workload: Workload, seen: Observation) -> Workload:
    """The workload with the lengths of the last step."""
    return replace(workload, prompt=seen.prompt or workload.prompt, response=seen.response or workload.response)


def remaining(plan: Plan, devices: frozenset[int]) -> Plan | None:
    """The plan without the units that lose a device; None when a model-stage has none left."""
    assignments = []
    for assignment in plan.assignments:
        units = tuple(unit for unit in assignment.units if set(unit) <= devices)
        if not units:
            return None
        assignments.append(Assignment(replace(assignment.candidate, dp=len(units)), units))
    partitions = tuple(replace(part, devices=part.devices & devices) for part in plan.partitions)
    return Plan(tuple(assignments), partitions)
