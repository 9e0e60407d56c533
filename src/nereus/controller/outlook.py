"""What the future looks like from here: steps, plans and transitions under one workload and one calibration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter

from nereus.controller.changes import changes
from nereus.core import (
    Assignment,
    Calibration,
    Capabilities,
    Cluster,
    ControllerState,
    EMUSet,
    Estimate,
    InfeasibleError,
    ModelStage,
    Options,
    Plan,
    Proposal,
    Rejection,
    SettingsError,
    Stage,
    StateSchema,
    TransitionDAG,
    Workflow,
    Workload,
    expand,
)
from nereus.cost.step import StepModel
from nereus.planning.judge import misfit
from nereus.planning.problem import Problem
from nereus.planning.search import search
from nereus.transition.budget import Budget
from nereus.transition.compile import compile, connect
from nereus.transition.estimate import estimate as estimate_transition
from nereus.transition.site import Site


@dataclass(frozen=True)
class Outlook:
    """Everything that a prediction depends on. `cluster` holds the devices a plan may use."""

    workflow: Workflow
    capabilities: Capabilities
    schemas: Mapping[ModelStage, StateSchema]
    cluster: Cluster
    workload: Workload
    calibration: Calibration
    headroom: float
    candidates: int

    @cached_property
    def model(self) -> StepModel:
        """Prices plans."""
        return StepModel(self.workflow, self.workload, self.cluster, self.calibration)

    @cached_property
    def _budget(self) -> Budget:
        return Budget(self._problem(None).capacity(), host_bytes=self.cluster.host_bytes())

    @cached_property
    def _site(self) -> Site:
        return Site.of(self.cluster)

    def estimate(self, plan: Plan) -> Estimate:
        """The predicted step of a plan."""
        return self.model.estimate(plan)

    def fastest(self) -> Plan:
        """The fastest plan that fits. Raises InfeasibleError when none does."""
        plan = search(self._problem(None), k=1).best[0].plan
        return settled(plan, expand(plan))

    def options(self, state: ControllerState, baseline: Plan) -> Options:
        """The fastest plans that fit, as far as a transition leads to them. Savings are against `baseline`."""
        if not self.cluster.devices:
            return Options(rejected=(Rejection("any plan", "no device is left"),))
        problem = self._problem(state.plan)
        rejected: list[Rejection] = []
        try:
            plans = [scored.plan for scored in search(problem, k=self.candidates).best]
        except (InfeasibleError, SettingsError) as error:  # a pinned degree may be out of reach of what is left
            plans = []
            rejected.append(Rejection("any plan", str(error)))
        near = next(
            (plan for plan in frugal(baseline, self.capabilities) if misfit(problem, self.model, plan) is None), None
        )
        if near is not None and near not in plans:
            plans.append(near)
        everywhere = replace(self, cluster=state.pool)
        proposals: list[Proposal] = []
        unreachable: list[Plan] = []
        for plan in sorted(plans, key=lambda plan: self.estimate(plan).step_s):
            try:
                proposal = everywhere._proposal(state, plan, baseline)
            except InfeasibleError as error:
                unreachable.append(plan)
                rejected.append(Rejection(changes(state.plan, plan), str(error)))
                continue
            if proposal.plan.assignments != state.plan.assignments or not proposal.dag.idle:
                proposals.append(proposal)
        return Options(tuple(proposals), tuple(rejected), fallback=unreachable[0] if unreachable else None)

    def transition_ideal_s(self, dag: TransitionDAG) -> float:
        """Seconds of a transition before anything was learnt about transitions: what learning compares with."""
        return estimate_transition(dag, self.schemas, self.cluster, Calibration()).seconds

    def _problem(self, current: Plan | None) -> Problem:
        return Problem(
            self.workflow, self.workload, self.cluster, self.capabilities, self.calibration, current, self.headroom
        )

    def _proposal(self, state: ControllerState, plan: Plan, baseline: Plan) -> Proposal:
        """The plan with its positions dealt so that least moves. Raises InfeasibleError when no way leads there."""
        dag = compile(state.units, plan, self.schemas, self._budget, self._site)
        placed = settled(plan, dag.goal)
        if misfit(self._problem(baseline), self.model, placed) is not None:
            # Dealt to move least, positions that the plan had kept apart have met on one device.
            dag = connect(state.units, expand(plan), self.schemas, self._budget, self._site)
            placed = settled(plan, dag.goal)
        return Proposal(
            plan=placed,
            units=dag.goal,
            dag=dag,
            estimate=self.estimate(placed),
            transition=estimate_transition(dag, self.schemas, self.cluster, self.calibration),
            saving_s=self._saving_s(baseline, placed),
        )

    def _saving_s(self, before: Plan, after: Plan) -> float:
        """Seconds a step that `after` is faster, less one standard deviation of that difference (D7.6).

        What both plans spend in one class of operations is uncertain for both alike and cancels.
        """
        old, new = self.model.class_s(before), self.model.class_s(after)
        variance = sum(
            (old.get(name, 0.0) - new.get(name, 0.0)) ** 2 * self.model.variance(name)
            for name in old.keys() | new.keys()
        )
        return sum(old.values()) - sum(new.values()) - math.sqrt(variance)


def settled(plan: Plan, units: EMUSet) -> Plan:
    """The plan that names the positions of `units`, model-stages and units in their usual order."""
    assignments: list[Assignment] = []
    for ms in plan.model_stages:
        assignment = plan.of(ms)
        devices = chain.from_iterable(block.devices for block in units.blocks(ms))
        placed = tuple(sorted(devices, key=itemgetter(0)))
        assignments.append(assignment if assignment.units == placed else replace(assignment, units=placed))
    return replace(plan, assignments=tuple(assignments))


def frugal(plan: Plan, capabilities: Capabilities) -> Iterator[Plan]:
    """The plan, then with ever smaller micro-batches, at last with full recomputation: nothing has to move for it.

    Nothing when the job cannot have the plan's degrees.
    """
    candidates = [assignment.candidate for assignment in plan.assignments]
    if any(capabilities.pin(each.model_stage).dp not in (None, each.dp) for each in candidates):
        return
    while True:
        yield plan
        smaller = tuple(_halved(each, capabilities) for each in plan.assignments)
        if smaller == plan.assignments:
            break
        plan = replace(plan, assignments=smaller)
    if "full" in capabilities.recompute:
        yield replace(
            plan,
            assignments=tuple(
                replace(each, candidate=replace(each.candidate, recompute="full"))
                if each.candidate.model_stage.stage is Stage.TRAINING
                else each
                for each in plan.assignments
            ),
        )


def _halved(assignment: Assignment, capabilities: Capabilities) -> Assignment:
    candidate = assignment.candidate
    half = candidate.micro_batch // 2
    allowed = [size for size in capabilities.micro_batches or (half,) if 1 <= size <= half]
    if not allowed or capabilities.pin(candidate.model_stage).micro_batch is not None:
        return assignment
    return replace(assignment, candidate=replace(candidate, micro_batch=max(allowed)))
