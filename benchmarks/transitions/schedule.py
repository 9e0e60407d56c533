"""How long the order of a transition takes in the scheduler's model, beside the paper's rule and a lower bound.

`python -m benchmarks.transitions --only schedule`. The paper's rule (§6.1) schedules the same commit groups: release
before acquire, stage order, every new replica read from the old units in turn. Pairs of plans: the planner's, the same
near capacity, and three model-stages whose ranges of devices change, with 5 % more memory than either plan needs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from benchmarks._result import Result
from benchmarks.transitions._pairs import MACHINE, NODE, planned, problem
from nereus.clusters.named import machine
from nereus.core import Assignment, Candidate, EMUSet, InfeasibleError, Layout, ModelStage, Plan, StateSchema, expand
from nereus.cost.state import schemas
from nereus.transition import connect, place, stored_bytes
from nereus.transition.budget import Budget
from nereus.transition.decompose import decompose
from nereus.transition.room import Room
from nereus.transition.rule import Rule
from nereus.transition.run import Run
from nereus.transition.site import Site

POOLS = (64, 128, 256, 512, 1024)
COUNT = 40
SLACK = 0.05
LINK = machine(MACHINE, 1).links["intra"].bytes_per_s
PAPER_LIMIT, BOUND_LIMIT = 0.85, 1.10


@dataclass(frozen=True, slots=True)
class Case:
    """Two sets of units, with what a device may hold."""

    name: str
    start: EMUSet
    goal: EMUSet
    schemas: dict[ModelStage, StateSchema]
    capacity: dict[int, int]


@dataclass(frozen=True, slots=True)
class Spans:
    """Bytes over the fastest link, one after another; None: no order was found."""

    name: str
    ours: float | None
    bound: float = 0.0
    paper: float | None = None


def spans(case: Case) -> Spans:
    """One case, both sides. Nodes are known, and as fast to reach as each other's devices."""
    node_of = {device: device // NODE for device in case.start.devices | case.goal.devices}
    try:
        dag = connect(case.start, case.goal, case.schemas, Budget(case.capacity), Site(node_of, bytes_per_s=LINK))
    except InfeasibleError:
        return Spans(case.name, None)
    return Spans(case.name, dag.span_bytes, dag.bound_bytes, papers_rule(case))


def papers_rule(case: Case) -> float | None:
    """The span when every new replica is read from the units of the start in turn, or None in a dead end."""
    locals_ = [
        decompose(case.start.of(ms), case.goal.of(ms), case.schemas[ms]).in_turn()
        for ms in case.goal.model_stages
        if set(case.start.of(ms)) != set(case.goal.of(ms))
    ]
    used = stored_bytes(case.start, case.schemas)
    room = Room(used, case.capacity, [build for local in locals_ for build in local.builds])
    run = Run(locals_, room, Site(), Rule())
    return run.span_bytes if run.walk() is None else None


def of_the_planner(devices: int, most: int, near_capacity: bool) -> Iterable[Case]:
    """Pairs of plans of the planner; near capacity: what the fuller plan needs and a tenth of both."""
    for pair in planned(devices, ("8b",), most):
        start = expand(pair.before)
        goal = place(start, pair.after, pair.schemas, pair.site)
        capacity = dict(pair.capacity)
        if near_capacity:
            now, then = stored_bytes(start, pair.schemas), stored_bytes(goal, pair.schemas)
            capacity = {d: max(now[d], then[d]) + (now[d] + then[d]) // 10 for d in {*now, *then}}
        yield Case(pair.name, start, goal, dict(pair.schemas), capacity)


def moving_ranges(devices: int, count: int) -> Iterable[Case]:
    """Three model-stages on ranges of their own, other ranges and layouts afterwards, in half of the cases permuted."""
    held = schemas(problem(devices).workflow)
    chosen = list(held)[:3]
    for seed in range(count):
        rng = random.Random(seed)
        before = _ranges(rng, devices, chosen)
        after = _ranges(rng, devices, rng.sample(chosen, 3) if rng.random() < 0.5 else chosen)
        start = expand(before)
        goal = place(start, after, held, Site({device: device // 8 for device in range(devices)}))
        now, then = stored_bytes(start, held), stored_bytes(goal, held)
        capacity = {d: int(max(now[d], then[d]) * (1 + SLACK)) for d in {*now, *then}}
        yield Case(f"{devices} ranges {seed}", start, goal, {ms: held[ms] for ms in chosen}, capacity)


def _ranges(rng: random.Random, devices: int, model_stages: Sequence[ModelStage]) -> Plan:
    cuts = [0, *sorted(rng.sample(range(8, devices, 8), 2)), devices]
    chosen: list[Assignment] = []
    for ms, low, high in zip(model_stages, cuts, cuts[1:], strict=False):
        fitting = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) if tp * pp <= high - low]
        layout = Layout(*rng.choice(fitting))
        dp = (high - low) // layout.size
        placed = tuple(tuple(range(low + i * layout.size, low + (i + 1) * layout.size)) for i in range(dp))
        chosen.append(Assignment(Candidate(ms, layout, dp), placed))
    return Plan(tuple(chosen))


def lines(where: str, found: Sequence[Spans]) -> list[Result]:
    """Ours over the paper's rule, and ours over the bound; what had nothing to move counts in neither."""
    solved = [each for each in found if each.ours]
    ruled = [each.ours / each.paper for each in solved if each.ours and each.paper]
    over = [each.ours / each.bound for each in solved if each.ours and each.bound]
    if not ruled:
        return [Result(f"makespan, {where}", "report", float("nan"), notes="nothing to move")]
    refused = sum(each.ours is None for each in found)
    stuck = sum(each.paper is None for each in solved)
    certified = sum(each.ours is not None and each.ours <= each.bound for each in solved)
    note = f"{len(solved)} pairs move bytes, {refused} have no order; the rule ends in a dead end in {stuck}"
    details = {each.name: [each.ours, each.bound, each.paper] for each in found}
    ratio, gap = mean(ruled), mean(over)
    return [
        Result(
            f"makespan / the paper's rule, {where}",
            f"<= {PAPER_LIMIT}",
            ratio,
            met=ratio <= PAPER_LIMIT,
            notes=f"{note}; from {min(ruled):.2f} to {max(ruled):.2f}",
            details=details,
        ),
        Result(
            f"makespan / lower bound, {where}",
            f"<= {BOUND_LIMIT}",
            gap,
            met=gap <= BOUND_LIMIT,
            notes=f"bound met by {certified} of {len(solved)}; at most {max(over):.2f}",
        ),
    ]


def run(quick: bool = False) -> list[Result]:
    """All lines; `quick` keeps to the smallest pool and a few pairs."""
    found: list[Result] = []
    every: list[Spans] = []
    of_plans: list[Spans] = []
    pools = POOLS[:1] if quick else POOLS
    for devices in pools:
        most, count = (1, 4) if quick else (2, COUNT)
        for near in (False, True):
            cases = [spans(case) for case in of_the_planner(devices, most, near)]
            found.extend(lines(f"{devices} devices, the planner's plans{', near capacity' if near else ''}", cases))
            of_plans.extend(cases)
        cases = [spans(case) for case in moving_ranges(devices, count)]
        found.extend(lines(f"{devices} devices, ranges that move, near capacity", cases))
        every.extend(cases)
    span = f"{pools[0]} to {pools[-1]} devices"
    for name, cases in (("all of the planner's plans", of_plans), ("all", [*of_plans, *every])):
        found.extend(replace(line, details={}) for line in lines(f"{span}, {name}", cases))
    return found
