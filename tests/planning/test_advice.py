"""Advice is a search of a changed problem: what is proposed fits, and one less of it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.core import Capabilities, Cluster, Device, InfeasibleError, Lengths, Pin
from nereus.planning import advice
from nereus.planning.advice import Advice
from nereus.planning.problem import Problem
from nereus.planning.search import search
from tests.controller.world import WORKFLOW
from tests.fakes import TRAINING, cluster, workload

BARE = Capabilities(recompute=("none",), micro_batches=(8,))
WIDE = Capabilities(recompute=("none", "full"))


def problem(devices: int, memory_bytes: int, able: Capabilities = BARE) -> Problem:
    work = replace(workload(), response=Lengths(40, 60, 64), max_response_tokens=64)
    return Problem(WORKFLOW, work, cluster(devices, memory_bytes, speed=0.3), able)


def fits(asked: Problem) -> bool:
    try:
        search(asked, 1)
    except InfeasibleError:
        return False
    return True


def smallest_that_fits(devices: int, able: Capabilities = BARE) -> int:
    """Memory of a device, by bisection to a KiB."""
    lower, upper = 0, 1 << 30
    while upper - lower > 1024:
        middle = (lower + upper) // 2
        lower, upper = (lower, middle) if fits(problem(devices, middle, able)) else (middle, upper)
    return upper


@pytest.fixture(scope="module")
def short() -> Problem:
    """Two devices with a tenth less than they need."""
    return problem(2, int(0.9 * smallest_that_fits(2)))


@pytest.fixture(scope="module")
def found(short: Problem) -> dict[str, Advice]:
    with pytest.raises(InfeasibleError) as caught:
        search(short, 1)
    return {line.kind: line for line in advice.remedies(short, WIDE, caught.value.short_bytes)}


def test_the_smallest_pool_is_named(short: Problem, found: dict[str, Advice]) -> None:
    devices = int(found["devices"].change.split()[0])
    assert fits(replace(short, cluster=cluster(devices, short.cluster.kinds["cpu"].memory_bytes, speed=0.3)))
    assert devices - 1 == 2 or not fits(
        replace(short, cluster=cluster(devices - 1, short.cluster.kinds["cpu"].memory_bytes, speed=0.3))
    )


def test_the_response_cap_fits_and_the_next_does_not(short: Problem, found: dict[str, Advice]) -> None:
    tokens = int(found["response"].change.split()[3])
    assert tokens < 64
    assert fits(replace(short, workload=advice.capped(short.workload, tokens)))
    assert not fits(replace(short, workload=advice.capped(short.workload, tokens + 64 // advice.CAPS)))


def test_the_memory_that_is_named_fits_and_is_near_the_least(short: Problem, found: dict[str, Advice]) -> None:
    has = short.cluster.kinds["cpu"].memory_bytes
    enough = smallest_that_fits(2)
    assert has < enough
    size = float(found["memory"].change.split()[2])
    assert 0.99 * enough <= size * 2**20 <= 1.05 * enough, found["memory"].change


def test_every_remedy_says_the_step_it_gives(short: Problem, found: dict[str, Advice]) -> None:
    assert {"option", "devices", "response", "memory"} <= set(found)
    for line in found.values():
        assert line.now_s is None
        assert f"{line.step_s:.3g} s" in line.describe()
    allowed = replace(short, capabilities=replace(BARE, recompute=("none", "full")))
    if "recompute" in found["option"].change:
        assert found["option"].step_s == pytest.approx(search(allowed, 1).best[0].estimate.step_s)


def test_gains_are_searches_of_the_changed_problem() -> None:
    roomy = problem(2, 64 << 20, WIDE)
    now_s = search(roomy, 1).best[0].estimate.step_s
    lines = advice.gains(roomy, now_s, WIDE)
    doubled = next(line for line in lines if line.kind == "devices")
    assert doubled.change.startswith("4 devices instead of 2")
    alone = search(replace(roomy, cluster=cluster(4, 64 << 20, speed=0.3)), 1)
    assert doubled.step_s == pytest.approx(alone.best[0].estimate.step_s)
    assert [line.gain for line in lines] == sorted((line.gain for line in lines), reverse=True)
    assert all(line.gain > advice.WORTH for line in lines if line.kind != "devices")


def test_a_pin_that_costs_time_is_named_and_one_of_the_host_is_not() -> None:
    slow = Pin(tp=1, pp=1, dp=1)
    pinned = replace(problem(2, 64 << 20, WIDE), capabilities=replace(WIDE, pins={TRAINING: slow}))
    now_s = search(pinned, 1).best[0].estimate.step_s
    assert any(line.kind == "pin" for line in advice.gains(pinned, now_s, WIDE))
    assert not any(line.kind == "pin" for line in advice.gains(pinned, now_s, pinned.capabilities))


def test_pools_grow_by_nodes_like_their_own() -> None:
    small = cluster(3)
    nodes = Cluster(
        tuple(Device(device.id, device.id // 2, device.kind) for device in cluster(4).devices),
        small.kinds,
        {"intra": small.links["intra"], "inter": replace(small.links["inter"], latency_s=1.0)},
    )
    grown = advice.grown(nodes, 3)
    sizes = [sum(device.node == node for device in grown.devices) for node in {d.node for d in grown.devices}]
    assert sizes == [2] * 6
    assert len(set(grown.ids)) == 12
    assert {device.node for device in advice.grown(small, 2).devices} == {0}, "one node where nodes make no difference"


def test_a_cap_shortens_what_is_longer_and_nothing_else() -> None:
    work = replace(workload(), response=Lengths.measured([4, 8, 40]), max_response_tokens=64)
    short = advice.capped(work, 10)
    assert (short.response.maximum, short.max_response_tokens) == (10, 10)
    assert short.response.mean < work.response.mean
    assert advice.capped(work, 64).response == work.response


def test_advice_names_the_zero_levels_that_its_plan_uses() -> None:
    """Where replicas are all that a job may have, its shards of the optimizer are what makes it fit."""
    able = replace(BARE, micro_batches=(), pins={TRAINING: Pin(tp=1, pp=1, dp=2)})
    asked = problem(2, smallest_that_fits(2, able) - 4096, able)
    with pytest.raises(InfeasibleError) as caught:
        search(asked, 1)
    lines = advice.remedies(asked, replace(able, zero=(0, 1, 2, 3)), caught.value.short_bytes)
    (line,) = (line for line in lines if line.change.startswith("ZeRO"))
    level = line.plan.of(TRAINING).candidate.zero
    assert level > 0
    assert str(TRAINING) in next(part for part in line.change.split(", ") if part.startswith(f"ZeRO {level} of "))


def test_models_without_an_optimizer_are_whole_whatever_zero_level_a_job_is_bound_to() -> None:
    able = replace(BARE, micro_batches=(), zero=(1,), pins={TRAINING: Pin(tp=1, pp=1, dp=2)})
    asked = problem(2, smallest_that_fits(2, able) - 4096, able)
    with pytest.raises(InfeasibleError) as caught:
        search(asked, 1)
    lines = advice.remedies(asked, replace(able, zero=(0, 1, 2, 3)), caught.value.short_bytes)
    (line,) = (line for line in lines if line.change.startswith("ZeRO"))
    assert str(TRAINING) in line.change
    assert "ZeRO 0" not in line.change
