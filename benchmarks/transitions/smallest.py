"""Small transitions beside the shortest of all their orders, found by trying them all.

`python -m benchmarks.transitions --only smallest`. Random layouts and devices, at most six units to build; and ranges
of devices of one to three model-stages that change, as in the part `schedule` on fewer devices. The oracle
knows nothing of the scheduler. It is asked twice: for the groups that the scheduler may form, and for groups of any
goal units, which may take less.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from tests.oracles.shortest_orders import TooManyError, shortest_bytes
from tests.support.small import full, three

from benchmarks._result import Result
from benchmarks.transitions.schedule import SLACK
from nereus.core import Assignment, Candidate, EMUSet, InfeasibleError, Layout, ModelStage, Plan, expand
from nereus.transition import connect
from nereus.transition.budget import Budget

CASES, RANGES, GROUPS = 400, 200, 6
SCHEMAS = three(rows=12)
ROUNDED = 1.0
"""Spans and bounds are whole bytes."""


@dataclass(frozen=True, slots=True)
class Case:
    """Bytes over the fastest link, one after another."""

    ours: float
    bound: float
    shortest: float
    any_groups: float


def run(quick: bool = False) -> list[Result]:
    """With as much memory as is wanted, and with little more than the fuller end needs."""
    found: list[Result] = []
    for where, limited in (("ample memory", False), ("little memory", True)):
        solved = list(cases(20 if quick else CASES, limited))
        found += _lines(where, [case for case in solved if case.shortest])
    moving = [case for case in ranges(5 if quick else RANGES) if case.shortest]
    return found + _lines(f"ranges that move, {SLACK:.0%} more memory than either end needs", moving)


def cases(count: int, limited: bool) -> Iterator[Case]:
    """As many as have an order, and are searched to the end."""
    rng = random.Random(int(limited))
    while count:
        devices, model_stages = rng.randint(2, 12), rng.sample(list(SCHEMAS), rng.randint(1, 3))
        start, goal = (expand(_plan(rng, model_stages, devices)) for _ in range(2))
        if not 0 < len(set(goal) - set(start)) <= GROUPS:
            continue
        try:
            yield _solved(start, goal, _capacity(rng, start, goal) if limited else {})
        except (InfeasibleError, TooManyError):
            continue
        count -= 1


def ranges(count: int) -> Iterator[Case]:
    """Model-stages on ranges of their own, other ranges and layouts afterwards, in half of the cases permuted."""
    rng = random.Random(2)
    while count:
        devices, model_stages = 2 * rng.randint(3, 5), rng.sample(list(SCHEMAS), rng.randint(1, 3))
        after = rng.sample(model_stages, len(model_stages)) if rng.random() < 0.5 else model_stages
        start, goal = (expand(_ranges(rng, order, devices)) for order in (model_stages, after))
        if len(set(start)) > GROUPS or not 0 < len(set(goal) - set(start)) <= GROUPS:
            continue
        most = full(start, goal, schemas=SCHEMAS)
        try:
            yield _solved(start, goal, {device: int(size * (1 + SLACK)) for device, size in most.items()})
        except (InfeasibleError, TooManyError):
            continue
        count -= 1


def _ranges(rng: random.Random, model_stages: list[ModelStage], devices: int) -> Plan:
    cuts = [0, *sorted(rng.sample(range(2, devices, 2), len(model_stages) - 1)), devices]
    chosen = []
    for ms, low, high in zip(model_stages, cuts, cuts[1:], strict=False):
        fitting = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= high - low]
        layout = Layout(*rng.choice(fitting))
        firsts = range(low, high - layout.size + 1, layout.size)
        placed = tuple(tuple(range(first, first + layout.size)) for first in firsts)
        chosen.append(Assignment(Candidate(ms, layout, len(placed)), placed))
    return Plan(tuple(chosen))


def _solved(start: EMUSet, goal: EMUSet, capacity: dict[int, int]) -> Case:
    dag = connect(start, goal, SCHEMAS, Budget(capacity))
    best = shortest_bytes(start, goal, SCHEMAS, capacity)
    assert best is not None
    other = shortest_bytes(start, goal, SCHEMAS, capacity, limit_bytes=best, free=True)
    assert other is not None
    return Case(dag.span_bytes, dag.bound_bytes, best, other)


def _capacity(rng: random.Random, start: EMUSet, goal: EMUSet) -> dict[int, int]:
    slack = rng.choice((100, 105, 125, 150))
    return {device: size * slack // 100 for device, size in full(start, goal, schemas=SCHEMAS).items()}


def _plan(rng: random.Random, model_stages: list[ModelStage], devices: int) -> Plan:
    chosen = []
    for ms in model_stages:
        fitting = [(tp, pp) for tp in range(1, 5) for pp in range(1, 5) if tp * pp <= min(devices, 8)]
        layout = Layout(*rng.choice(fitting))
        dp = rng.randint(1, devices // layout.size)
        pool = rng.sample(range(devices), dp * layout.size)
        if rng.random() < 0.5:
            pool.sort()
        placed = tuple(tuple(pool[i : i + layout.size]) for i in range(0, len(pool), layout.size))
        chosen.append(Assignment(Candidate(ms, layout, dp), placed))
    return Plan(tuple(chosen))


def _lines(where: str, found: list[Case]) -> list[Result]:
    ratios = [case.ours / case.shortest for case in found]
    optimal = sum(case.ours <= case.shortest + ROUNDED for case in found)
    certified = sum(case.ours <= case.bound for case in found)
    above = sum(case.bound > case.shortest + ROUNDED for case in found)
    shorter = [case.shortest / case.any_groups for case in found if case.any_groups < case.shortest - ROUNDED]
    over = sum(case.bound > case.any_groups + ROUNDED for case in found)
    bounds = [case.bound / case.shortest for case in found]
    ours = f"shortest in {optimal} of {len(found)}, certified in {certified}; at most {max(ratios):.2f}"
    sooner = f"groups of any goal units end sooner in {len(shorter)}, by {mean(shorter or [1]):.2f} x"
    least = f"from {min(bounds):.2f} to {max(bounds):.2f}; above it in {above}, above that of any groups in {over}"
    return [
        Result(
            f"small transitions, {where}: ours / the shortest order",
            "report",
            mean(ratios),
            notes=f"{ours}; {sooner}",
            details={"cases": [[case.ours, case.bound, case.shortest, case.any_groups] for case in found]},
        ),
        Result(
            f"small transitions, {where}: our bound / the shortest order",
            "<= 1",
            mean(bounds),
            met=not above,
            notes=least,
        ),
    ]
