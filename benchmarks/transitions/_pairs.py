"""Pairs of plans that a transition joins: of the planner at other lengths, pools and models, and random valid ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from nereus.algorithms.ppo import Ppo
from nereus.clusters.named import machine
from nereus.core import (
    Assignment,
    Candidate,
    Capabilities,
    Cluster,
    Head,
    InfeasibleError,
    Layout,
    Lengths,
    ModelStage,
    Plan,
    StateSchema,
    Workload,
)
from nereus.cost.state import schemas
from nereus.families.models import named
from nereus.planning.problem import Problem
from nereus.planning.search import search
from nereus.transition.site import Site

MACHINE, NODE = "h200x8", 8
MODELS = {
    "8b": ("llama-3.1-8b", "llama-3.1-8b"),
    "70b": ("llama-3.1-70b", "llama-3.1-8b"),
}
"""Actor and reference; critic and reward."""
RESPONSES = (256.0, 1024.0, 4096.0, 16384.0)
"""Mean tokens of a response."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two plans of one job and the pool that holds both."""

    name: str
    before: Plan
    after: Plan
    schemas: Mapping[ModelStage, StateSchema]
    cluster: Cluster
    capacity: Mapping[int, int]
    """Bytes that state may use, by device."""

    @property
    def site(self) -> Site:
        """Nodes and kinds of the pool."""
        return Site.of(self.cluster)


@cache
def problem(devices: int, models: str = "8b", response: float = 2048.0, dp: str = "powers") -> Problem:
    """A PPO job of five model-stages on the first `devices` of as many nodes of eight as they need."""
    large, small = MODELS[models]
    specs = {name: named(large) for name in ("actor", "reference")}
    specs |= {name: named(small, head=Head.SCALAR) for name in ("critic", "reward")}
    whole = machine(MACHINE, -(-devices // NODE))
    cluster = whole if devices == len(whole.devices) else whole.only(whole.ids[:devices])
    sequences = max(2048, devices)
    lengths = Lengths.constant(response)
    workload = Workload(sequences, 1, Lengths.constant(256), lengths, sequences // 4, 8192)
    return Problem(Ppo().workflow(specs), workload, cluster, Capabilities(dp=dp))


@cache
def held(models: str) -> Mapping[ModelStage, StateSchema]:
    """The state of every model-stage."""
    return schemas(problem(NODE, models).workflow)


@cache
def _plans(devices: int, models: str, response: float, dp: str, most: int) -> tuple[Plan, ...]:
    try:
        found = search(problem(devices, models, response, dp), most)
    except InfeasibleError:
        return ()
    return tuple(scored.plan for scored in found.best)


def planned(devices: int, models: Sequence[str] = tuple(MODELS), most: int = 3) -> Iterator[Pair]:
    """From the best plans at one length to the best at the next and back, and to and from a pool with a node less."""
    for name in models:
        for dp in ("powers", "any"):
            runs = [_plans(devices, name, response, dp, most) for response in RESPONSES]
            runs.append(_plans(devices - NODE, name, RESPONSES[1], dp, most) if devices > NODE else ())
            runs.append(runs[2])
            plans = [plan for run in runs for plan in run]
            yield from _both_ways(f"{devices} {name} {dp}", devices, name, plans)


def drawn(devices: int, count: int, seed: int = 0, models: Sequence[str] = tuple(MODELS)) -> Iterator[Pair]:
    """Valid plans that no planner made: any degrees, odd ones included, units on runs of devices or scattered."""
    rng = random.Random(seed)
    for index in range(count):
        name = models[index % len(models)]
        pool = problem(devices, name).cluster.ids
        before, after = (
            Plan(tuple(_assignment(rng, ms, schema.layers, pool) for ms, schema in held(name).items()))
            for _ in range(2)
        )
        yield _pair(f"{devices} drawn {index}", devices, name, before, after)


def _both_ways(name: str, devices: int, models: str, plans: Sequence[Plan]) -> Iterator[Pair]:
    for index, (before, after) in enumerate(pairwise(plans)):
        if before.assignments != after.assignments:
            yield _pair(f"{name} {index}", devices, models, before, after)
            yield _pair(f"{name} {index} back", devices, models, after, before)


def _pair(name: str, devices: int, models: str, before: Plan, after: Plan) -> Pair:
    asked = problem(devices, models)
    capacity = {device: asked.usable_bytes(device) for device in asked.cluster.ids}
    return Pair(name, before, after, held(models), asked.cluster, capacity)


def _assignment(rng: random.Random, ms: ModelStage, layers: int, pool: Sequence[int]) -> Assignment:
    tp, pp = rng.choice((1, 2, 3, 4, 6, 8)), rng.choice((1, 2, 3, 4, 5, 8, 16))
    layout = Layout(tp, min(pp, max(1, len(pool) // tp), layers))
    dp = rng.randint(1, len(pool) // layout.size)
    devices = rng.sample(list(pool), dp * layout.size)
    if rng.random() < 0.8:
        devices.sort()
    placed = tuple(tuple(devices[i : i + layout.size]) for i in range(0, len(devices), layout.size))
    return Assignment(Candidate(ms, layout, dp), placed)
