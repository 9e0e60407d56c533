"""A free device never hurts: whatever a smaller pool does, a larger one can do too."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.algorithms.grpo import Grpo
from nereus.clusters.named import machine
from nereus.core import Capabilities, Cluster, InfeasibleError, Lengths, Workload
from nereus.families.models import named
from nereus.planning.problem import Problem
from nereus.planning.search import search
from tests.cost.jobs import SMALL, WORKLOAD, cluster, grpo, ppo

ROUNDING = 1 + 1e-9


def step_s(asked: Problem) -> float:
    try:
        return search(asked, 1).best[0].estimate.step_s
    except InfeasibleError:
        return float("inf")


def first(pool: Cluster, devices: int) -> Cluster:
    return pool.only(pool.ids[:devices])


@settings(max_examples=8, deadline=None)
@given(
    node=st.sampled_from([1, 2, 3, 4, 7]),
    devices=st.integers(1, 10),
    memory=st.floats(14.0, 60.0),
    five=st.booleans(),
    layers=st.sampled_from([2, 5, 8]),
    replicas=st.sampled_from(["any", "powers"]),
)
def test_one_more_device_in_the_last_node_or_a_new_one(
    node: int, devices: int, memory: float, five: bool, layers: int, replicas: str
) -> None:
    """At memory from where nothing fits on few devices to where anything does."""
    spec = replace(SMALL, layers=layers)
    pool = cluster(node * 11, int(memory * 1e6), 11)
    able = Capabilities(dp=replicas, recompute=("none", "full"))
    asked = Problem(ppo(spec) if five else grpo(spec), WORKLOAD, pool, able)
    fewer, more = (step_s(replace(asked, cluster=first(pool, count))) for count in (devices, devices + 1))
    assert more <= fewer * ROUNDING


@pytest.mark.parametrize("five", [False, True])
def test_two_nodes_do_whatever_one_does(five: bool) -> None:
    """Model-stages side by side inside a node are given up for no second node, down to memory where nothing fits."""
    spec, fitting = replace(SMALL, layers=3), 0
    for memory in (16, 20, 24, 28, 36, 48):
        asked = Problem(ppo(spec) if five else grpo(spec), WORKLOAD, cluster(5, memory * 10**6), Capabilities())
        one, two = step_s(asked), step_s(replace(asked, cluster=cluster(10, memory * 10**6, 2)))
        assert two <= one * ROUNDING
        fitting += one < float("inf")
    assert fitting


@pytest.mark.parametrize(("name", "kind"), [("llama-3.1-70b", "h200x8"), ("qwen3-30b-a3b", "h100x8")])
def test_models_by_name_from_one_device_to_many(name: str, kind: str) -> None:
    specs = dict.fromkeys(("actor", "reference", "reward"), named(name))
    workload = Workload(64, 8, Lengths.constant(512), Lengths(1024, 2500, 7000), 512, 8192)
    pool = machine(kind, 20)
    asked = Problem(Grpo().workflow(specs), workload, pool, Capabilities(recompute=("full",), micro_batches=(1, 2)))
    times = [step_s(replace(asked, cluster=first(pool, count))) for count in (7, 15, 16, 24, 40, 63, 65, 72, 136, 160)]
    assert all(more <= fewer * ROUNDING for fewer, more in pairwise(times))
    assert times[-1] < times[3]
