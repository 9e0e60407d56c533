"""A free device never hurts: whatever a smaller pool does, a larger one can do too."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.algorithms.grpo import Grpo
from nereus.algorithms.remax import Remax
from nereus.clusters.named import machine
from nereus.core import Capabilities, Cluster, Device, Head, InfeasibleError, Lengths, ModelSpec, Workload
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


def remax(layers: int, kv_heads: int, prompts: int, mini_batch: int, asynchronous: bool = False) -> Problem:
    """A job of four model-stages on one device of a fast kind."""
    spec = ModelSpec("llama", layers, 2048, 4, kv_heads, 512, 4096, 32001, dtype="bf16")
    specs = dict.fromkeys(("actor", "reference", "reward"), spec) | {"reward": replace(spec, head=Head.SCALAR)}
    workload = Workload(prompts, 2, Lengths(128, 200, 256), Lengths(256, 600, 1024), mini_batch, 1024)
    workflow = replace(Remax().workflow(specs), asynchronous=asynchronous)
    return Problem(workflow, workload, machine("h200x8", 1), Capabilities(recompute=("none", "full")))


def on_nodes(asked: Problem, sizes: tuple[int, ...], memory_bytes: int) -> Problem:
    """The same on nodes of so many devices with this much memory."""
    (kind,) = asked.cluster.kinds.values()
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    devices = tuple(Device(index, node, kind.name) for index, node in enumerate(nodes))
    kinds = {kind.name: replace(kind, memory_bytes=memory_bytes)}
    return replace(asked, cluster=Cluster(devices, kinds, asked.cluster.links))


def test_three_parts_of_a_node_are_not_given_up_for_more_devices() -> None:
    """Near the last bytes with which anything fits on one node: three model-stages side by side."""
    asked = remax(8, 2, 16, 16)
    low, high = 3 * 10**9, 5 * 10**9
    while high - low > 10**7:
        middle = (low + high) // 2
        low, high = (low, middle) if step_s(on_nodes(asked, (7,), middle)) < float("inf") else (middle, high)
    for memory in (high, int(1.1 * high)):
        fewer = step_s(on_nodes(asked, (7,), memory))
        assert all(step_s(on_nodes(asked, more, memory)) <= fewer * ROUNDING for more in ((7, 7), (7, 1), (8,)))


@pytest.mark.parametrize(("name", "kind"), [("llama-3.1-70b", "h200x8"), ("qwen3-30b-a3b", "h100x8")])
def test_models_by_name_from_one_device_to_many(name: str, kind: str) -> None:
    specs = dict.fromkeys(("actor", "reference", "reward"), named(name))
    workload = Workload(64, 8, Lengths.constant(512), Lengths(1024, 2500, 7000), 512, 8192)
    pool = machine(kind, 20)
    asked = Problem(Grpo().workflow(specs), workload, pool, Capabilities(recompute=("full",), micro_batches=(1, 2)))
    times = [step_s(replace(asked, cluster=first(pool, count))) for count in (7, 15, 16, 24, 40, 63, 65, 72, 136, 160)]
    assert all(more <= fewer * ROUNDING for fewer, more in pairwise(times))
    assert times[-1] < times[3]
