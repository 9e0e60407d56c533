"""The search finds the best plan there is, names devices sensibly, and says what is missing when nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import Capabilities, Cluster, InfeasibleError, Lengths, Pin, SettingsError, Workflow, expand
from nereus.cost.state import family_of
from nereus.cost.step import StepModel
from nereus.planning.judge import judge
from nereus.planning.problem import Problem
from nereus.planning.search import search
from tests.cost.jobs import (
    ACTOR,
    GENERATION,
    REFERENCE,
    SMALL,
    TINY,
    WORKLOAD,
    cluster,
    colocated,
    grpo,
    ppo,
)
from tests.oracles.brute_force_plans import Space, profile

ONE_SIZE = Capabilities(micro_batches=(1,), recompute=("none",))
THREE, TWO = (replace(WORKLOAD, prompts=count, samples_per_prompt=1, mini_batch=count) for count in (3, 2))

CASES = {
    "grpo, 2 devices": (Space(grpo(), THREE), 2, Capabilities()),
    "grpo, 3 devices": (Space(grpo(), THREE, (1,), ("none",)), 3, ONE_SIZE),
    "ppo, 2 devices": (Space(ppo(), TWO, (1,), ("none",)), 2, ONE_SIZE),
}


@cache
def everything(case: str) -> list[tuple[float, int]]:
    space, devices, _ = CASES[case]
    return profile(StepModel(space.workflow, space.workload, cluster(devices)), space, range(devices))


def problem(workflow: Workflow, devices: Cluster, able: Capabilities | None = None, **changes: Any) -> Problem:
    workload = replace(WORKLOAD, **changes)
    return Problem(workflow, workload, devices, able or Capabilities())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("room", [0.0, 0.01, 0.05, 0.2, 0.5, 1.0])
def test_the_search_equals_trying_every_plan_on_every_set_of_devices(case: str, room: float) -> None:
    """From the least memory in which anything fits up to plenty."""
    space, devices, able = CASES[case]
    tried = everything(case)
    least, most = min(size for _, size in tried), max(size for _, size in tried)
    usable = int(least + room * (most - least))
    fastest = min(step_s for step_s, size in tried if size <= usable)
    asked = Problem(space.workflow, space.workload, cluster(devices, int(usable / 0.9) + 1), able)
    assert asked.usable_bytes(0) in (usable, usable + 1)
    assert search(asked, 1).best[0].estimate.step_s == pytest.approx(fastest, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_a_byte_less_than_the_smallest_capacity_fits_nothing(case: str) -> None:
    space, devices, able = CASES[case]
    least = min(size for _, size in everything(case))
    capacity = int(least / 0.9) - 8
    with pytest.raises(InfeasibleError) as error:
        search(Problem(space.workflow, space.workload, cluster(devices, capacity), able))
    words = str(error.value)
    assert error.value.exit_code == 3
    short = max(error.value.short_bytes.values())
    assert 0 < short <= 12
    assert f"{short:,} bytes short" in words
    assert f"the smallest capacity that would do is {capacity + short:,} bytes" in words
    assert any(call.name in words for call in space.workflow.calls)
    assert search(Problem(space.workflow, space.workload, cluster(devices, capacity + short), able)).best


@settings(max_examples=15, deadline=None)
@given(
    devices=st.integers(1, 6),
    memory=st.floats(1.0, 30.0),
    response=st.integers(4, 300),
    mini_batch=st.sampled_from([2, 4, 8]),
    five=st.booleans(),
)
def test_what_the_search_promises_the_cost_model_confirms(
    devices: int, memory: float, response: int, mini_batch: int, five: bool
) -> None:
    workflow = ppo() if five else grpo()
    asked = problem(
        workflow,
        cluster(devices, int(memory * 1e6)),
        response=Lengths.constant(response),
        mini_batch=mini_batch,
        max_response_tokens=300,
    )
    try:
        result = search(asked)
    except InfeasibleError:
        return
    times = [scored.estimate.step_s for scored in result.best]
    assert times == pytest.approx(sorted(times), rel=1e-8)
    assert result.bound_s == pytest.approx(times[0])
    names = [scored.plan.describe() for scored in result.best]
    assert len(set(names)) == len(names)
    for scored in result.best:
        assert scored.estimate == asked.model().estimate(scored.plan)
        assert judge(asked, scored.plan) == scored
        assert max(scored.estimate.peak_bytes.values()) <= 0.9 * memory * 1e6
        assert set(scored.plan.model_stages) == set(workflow.model_stages)
        for unit in expand(scored.plan):
            spec = workflow.spec(unit.model_stage)
            assert unit.layout.tp in family_of(spec).legal_tp(spec)
            assert unit.layout.pp <= spec.layers


@settings(max_examples=15, deadline=None)
@given(devices=st.integers(1, 5), memory=st.floats(1.5, 20.0), more=st.floats(1.0, 3.0))
def test_more_memory_and_a_free_device_never_hurt(devices: int, memory: float, more: float) -> None:
    def step_s(count: int, size: float) -> float:
        try:
            return search(problem(grpo(), cluster(count, int(size * 1e6))), 1).best[0].estimate.step_s
        except InfeasibleError:
            return float("inf")

    base = step_s(devices, memory)
    assert step_s(devices, memory * more) <= base * (1 + 1e-9)
    assert step_s(devices + 1, memory) <= base * (1 + 1e-9)


@pytest.mark.parametrize("devices", [3, 5])
def test_irregular_pools_use_any_number_of_replicas(devices: int) -> None:
    """Arithmetic alone: with nothing else to pay for, every device computes."""
    fast_links = replace(cluster(devices, launch_s=1e-12, memory_bytes_per_s=1e15))
    asked = problem(grpo(SMALL), fast_links, prompts=15, samples_per_prompt=4, mini_batch=60)
    best = search(asked, 1).best[0].plan
    assert best.of(GENERATION).candidate.dp == devices
    assert best.of(ACTOR).candidate.dp == devices


def test_thirty_layers_on_four_pp_ranks() -> None:
    spec = replace(SMALL, layers=30)
    able = Capabilities(pins={ms: Pin(tp=1, pp=4, dp=1) for ms in (GENERATION, REFERENCE, ACTOR)})
    best = search(problem(grpo(spec), cluster(4), able), 1).best[0].plan
    for unit in expand(best):
        assert [len(unit.layout.layers_of(rank, 30)) for rank in range(4)] == [8, 8, 7, 7]


def test_tp_groups_stay_inside_a_node() -> None:
    """Six devices on two nodes of three: a TP pair across them would be slow, and is never placed."""
    able = Capabilities(pins={ACTOR: Pin(tp=2, dp=2)})
    asked = problem(grpo(SMALL), cluster(6, nodes=2), able)
    for scored in search(asked).best:
        for unit in expand(scored.plan):
            for rank in range(unit.layout.pp):
                group = unit.devices[rank * unit.layout.tp : (rank + 1) * unit.layout.tp]
                assert len({device // 3 for device in group}) == 1


def test_pinned_degrees_and_devices_are_kept() -> None:
    able = Capabilities(pins={ACTOR: Pin(tp=2, pp=1, dp=1, micro_batch=2, devices=(1, 3))})
    for scored in search(problem(grpo(), cluster(4), able)).best:
        chosen = scored.plan.of(ACTOR)
        assert (chosen.candidate.layout.tp, chosen.candidate.dp, chosen.candidate.micro_batch) == (2, 1, 2)
        assert chosen.devices == {1, 3}


def test_equally_fast_plans_keep_the_current_devices() -> None:
    """One device of four is enough for a pinned job; it stays where it is."""
    able = Capabilities(pins={ms: Pin(tp=1, pp=1, dp=1) for ms in (GENERATION, REFERENCE, ACTOR)})
    free = search(problem(grpo(), cluster(4), able), 1).best[0]
    moved = replace(
        free.plan,
        assignments=tuple(
            replace(a, units=tuple(tuple(3 - device for device in unit) for unit in a.units))
            for a in free.plan.assignments
        ),
        partitions=(),
    )
    again = search(replace(problem(grpo(), cluster(4), able), current=moved), 1).best[0]
    assert again.estimate.step_s == pytest.approx(free.estimate.step_s)
    assert again.plan == moved


def test_the_search_is_deterministic() -> None:
    asked = problem(ppo(), cluster(4, 3 * 10**6))
    assert search(asked).best == search(asked).best


def test_a_plan_on_lost_devices_is_not_kept() -> None:
    current = colocated(grpo(), dp=4)
    asked = replace(problem(grpo(), cluster(4).without([3])), current=current)
    assert all(3 not in scored.plan.devices for scored in search(asked).best)
    with pytest.raises(InfeasibleError, match=r"devices \[3\]"):
        judge(asked, current)


def test_judging_a_plan_that_does_not_fit_names_device_bytes_call_and_term() -> None:
    """Idle optimizer state beside the engine: the plan is refused with the arithmetic."""
    asked = problem(ppo(SMALL), cluster(2, 40 * 10**6))
    with pytest.raises(InfeasibleError) as error:
        judge(asked, colocated(ppo(SMALL), dp=2, micro_batch=4))
    words = str(error.value)
    assert set(error.value.short_bytes) == {0, 1}
    assert "device 0 has 40,000,000 bytes" in words
    assert re.search(r"update_actor: gradients [\d.]+ MiB of [\d.]+ MiB, [\d.]+ MiB stored", words)


def test_a_pool_too_small_for_pinned_degrees_says_so() -> None:
    able = Capabilities(pins={ACTOR: Pin(tp=2, pp=2)})
    with pytest.raises(InfeasibleError, match="actor/training has no layout"):
        search(problem(grpo(), cluster(3), able))


def test_heads_not_divisible_by_a_pinned_tp() -> None:
    """28 heads, 4 KV heads, TP pinned to 8 on 8 devices."""
    spec = replace(TINY, heads=28, kv_heads=4)
    able = Capabilities(pins={GENERATION: Pin(tp=8)})
    with pytest.raises(SettingsError, match=r"28 heads and 4 KV heads: valid TP 1, 2, 4$"):
        search(problem(grpo(spec), cluster(8), able))
