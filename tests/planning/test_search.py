"""The search returns plans that the cost model confirms, on sensible devices, or says what is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import Capabilities, Cluster, Device, InfeasibleError, Lengths, Pin, SettingsError, Workflow, expand
from nereus.cost.state import family_of
from nereus.planning.choices import Choices
from nereus.planning.judge import judge
from nereus.planning.problem import Problem
from nereus.planning.search import search
from nereus.planning.select import fastest
from tests.cost.jobs import ACTOR, CRITIC, GENERATION, REFERENCE, SMALL, TINY, WORKLOAD, cluster, colocated, grpo, ppo


def problem(workflow: Workflow, devices: Cluster, able: Capabilities | None = None, **changes: Any) -> Problem:
    workload = replace(WORKLOAD, **changes)
    return Problem(workflow, workload, devices, able or Capabilities())


def step_s(asked: Problem) -> float:
    try:
        return search(asked, 1).best[0].estimate.step_s
    except InfeasibleError:
        return float("inf")


@settings(max_examples=10, deadline=None)
@given(
    devices=st.integers(1, 6),
    nodes=st.integers(1, 3),
    memory=st.floats(3.0, 30.0),
    response=st.integers(4, 300),
    mini_batch=st.sampled_from([2, 4, 8]),
    five=st.booleans(),
    pooled=st.sampled_from(["any", "powers"]),
)
def test_what_the_search_promises_the_cost_model_confirms(
    devices: int, nodes: int, memory: float, response: int, mini_batch: int, five: bool, pooled: str
) -> None:
    workflow = ppo() if five else grpo()
    asked = problem(
        workflow,
        cluster(devices, int(memory * 1e6), nodes),
        Capabilities(dp=pooled),
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
    assert result.bound_s is None or result.bound_s == pytest.approx(times[0])
    names = [tuple((str(a.candidate.layout), a.candidate.dp) for a in s.plan.assignments) for s in result.best]
    assert len(set(names)) == len(names)
    for scored in result.best:
        assert scored.estimate == asked.model().estimate(scored.plan)
        assert judge(asked, scored.plan) == scored
        assert set(scored.plan.model_stages) == set(workflow.model_stages)
        for unit in expand(scored.plan):
            spec = workflow.spec(unit.model_stage)
            assert unit.layout.tp in family_of(spec).legal_tp(spec)
            assert unit.layout.pp <= spec.layers


@settings(max_examples=15, deadline=None)
@given(
    devices=st.integers(1, 9),
    nodes=st.sampled_from([1, 3]),
    memory=st.floats(5.0, 60.0),
    five=st.booleans(),
    asynchronous=st.booleans(),
)
def test_the_objective_of_the_search_is_the_estimate_of_the_placed_plan(
    devices: int, nodes: int, memory: float, five: bool, asynchronous: bool
) -> None:
    """Nodes of equal size, so that every shape is looked at."""
    count = devices if nodes == 1 else nodes * -(-devices // nodes)
    workflow = replace(ppo() if five else grpo(), asynchronous=asynchronous)
    asked = problem(workflow, cluster(count, int(memory * 1e6), nodes))
    model = asked.model()
    choices = Choices(asked, model)
    arrangements = list(choices.arrangements())
    for found in fastest(arrangements, asked.workflow, 6).found.values():
        placed = choices.plan(arrangements[found.arrangement], found)
        estimate = model.estimate(placed)
        assert estimate.step_s == pytest.approx(found.step_s, rel=1e-9)
        assert max(estimate.peak_bytes.values()) <= asked.usable_bytes(0)


@settings(max_examples=15, deadline=None)
@given(devices=st.integers(1, 5), memory=st.floats(1.5, 20.0), more=st.floats(1.0, 3.0))
def test_more_memory_and_a_free_device_never_hurt(devices: int, memory: float, more: float) -> None:
    base = step_s(problem(grpo(), cluster(devices, int(memory * 1e6))))
    assert step_s(problem(grpo(), cluster(devices, int(memory * more * 1e6)))) <= base * (1 + 1e-9)
    assert step_s(problem(grpo(), cluster(devices + 1, int(memory * 1e6)))) <= base * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(response=st.integers(4, 200), longer=st.integers(1, 100))
def test_longer_responses_never_make_the_step_shorter(response: int, longer: int) -> None:
    def of(tokens: int) -> float:
        return step_s(
            problem(grpo(), cluster(3, 40 * 10**6), response=Lengths.constant(tokens), max_response_tokens=300)
        )

    assert of(response + longer) >= of(response) * (1 - 1e-9)


@pytest.mark.parametrize("devices", [2, 12])
def test_a_plan_that_fits_device_by_device_alone_is_found_on_any_pool(devices: int) -> None:
    """The fullest pp ranks of two model-stages lie on different devices: their sum is more than any device holds."""
    pins = {ms: Pin(tp=1, pp=2, dp=1, micro_batch=1) for ms in (GENERATION, REFERENCE, ACTOR)}
    able = Capabilities(recompute=("none",), pins=pins, placement="colocated")
    generous = search(problem(grpo(SMALL), cluster(devices), able), 1).best[0]
    peak = max(generous.estimate.peak_bytes.values())
    exact = problem(grpo(SMALL), cluster(devices, int(peak / 0.9) + 8), able)
    found = search(exact, 1)
    assert max(found.best[0].estimate.peak_bytes.values()) <= peak
    assert found.bound_s is None  # of those that fit like this, faster ones are not ruled out
    assert search(problem(grpo(SMALL), cluster(devices), able), 1).bound_s == generous.estimate.step_s
    with pytest.raises(InfeasibleError, match="bytes short"):
        search(replace(exact, cluster=cluster(devices, int(peak / 0.9) - 8)), 1)


@pytest.mark.parametrize("devices", [3, 5])
def test_irregular_pools_use_any_number_of_replicas(devices: int) -> None:
    """Arithmetic alone: with nothing else to pay for, every device computes."""
    fast_links = replace(cluster(devices, launch_s=1e-12, memory_bytes_per_s=1e15))
    asked = problem(grpo(SMALL), fast_links, prompts=15, samples_per_prompt=4, mini_batch=60)
    best = search(asked, 1).best[0].plan
    assert best.of(GENERATION).candidate.dp == devices
    assert best.of(ACTOR).candidate.dp == devices


def test_any_dp_is_never_slower_than_powers_of_two() -> None:
    for devices in (3, 6, 7):
        work = {"prompts": 12, "samples_per_prompt": 1, "mini_batch": 12}
        free = problem(grpo(SMALL), cluster(devices), Capabilities(dp="any"), **work)
        assert step_s(free) <= step_s(replace(free, capabilities=Capabilities(dp="powers"))) * (1 + 1e-9)


def test_thirty_layers_on_four_pp_ranks() -> None:
    spec = replace(SMALL, layers=30)
    able = Capabilities(pins={ms: Pin(tp=1, pp=4, dp=1) for ms in (GENERATION, REFERENCE, ACTOR)})
    best = search(problem(grpo(spec), cluster(4), able), 1).best[0].plan
    for unit in expand(best):
        assert [len(unit.layout.layers_of(rank, 30)) for rank in range(4)] == [8, 8, 7, 7]


def test_tp_groups_stay_inside_a_node() -> None:
    """Six devices on two nodes of three: a TP pair across them would be slow, and is never placed."""
    able = Capabilities(pins={ACTOR: Pin(tp=2, dp=2)})
    for scored in search(problem(grpo(SMALL), cluster(6, nodes=2), able)).best:
        for unit in expand(scored.plan):
            for rank in range(unit.layout.pp):
                group = unit.devices[rank * unit.layout.tp : (rank + 1) * unit.layout.tp]
                assert len({device // 3 for device in group}) == 1


def test_nodes_with_devices_missing_are_used() -> None:
    """Two whole nodes and one with a device gone: the third still works."""
    whole = cluster(12, nodes=3)
    asked = problem(grpo(SMALL), whole.without([11]), prompts=16, samples_per_prompt=4, mini_batch=64)
    best = search(asked, 1).best[0]
    assert best.estimate.step_s <= step_s(replace(asked, cluster=whole.without([8, 9, 10, 11]))) * (1 + 1e-9)
    assert 11 not in best.plan.devices
    assert best.plan.devices & {8, 9, 10}


def test_two_kinds_of_devices_are_planned_together_or_apart() -> None:
    """The slow kind helps where its share of the work is worth its pace, and never makes a step slower."""
    base = cluster(8, nodes=2)
    slow = replace(base.kinds["cpu"], name="slow", peak_flops={"fp32": 2e9})
    devices = tuple(replace(d, kind="slow") if d.node else d for d in base.devices)
    both = Cluster(devices, {"cpu": base.kinds["cpu"], "slow": slow}, base.links)
    asked = problem(ppo(SMALL), both, prompts=16, mini_batch=16)
    result = search(asked)
    alone = step_s(replace(asked, cluster=both.only(range(4))))
    assert result.best[0].estimate.step_s <= alone * (1 + 1e-9)
    for scored in result.best:
        assert scored.estimate == asked.model().estimate(scored.plan)
    assert any(scored.plan.devices & {4, 5, 6, 7} for scored in result.best)


def test_pinned_degrees_and_devices_are_kept() -> None:
    able = Capabilities(pins={ACTOR: Pin(tp=2, pp=1, dp=1, micro_batch=2, devices=(1, 3))})
    for scored in search(problem(grpo(), cluster(4), able)).best:
        chosen = scored.plan.of(ACTOR)
        assert (chosen.candidate.layout.tp, chosen.candidate.dp, chosen.candidate.micro_batch) == (2, 1, 2)
        assert chosen.devices == {1, 3}


def test_models_pinned_to_different_devices_run_at_the_same_time() -> None:
    able = Capabilities(pins={ACTOR: Pin(devices=(0, 1)), CRITIC: Pin(devices=(2, 3))})
    best = search(problem(ppo(), cluster(4), able), 1).best[0]
    assert best.plan.of(ACTOR).devices <= {0, 1}
    assert best.plan.of(CRITIC).devices <= {2, 3}
    path = best.estimate.critical_path
    assert not {"update_actor", "update_critic"} <= set(path)


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
    assert {a.units for a in again.plan.assignments} == {a.units for a in moved.assignments}


def test_the_search_is_deterministic() -> None:
    asked = problem(ppo(), cluster(4, 3 * 10**6))
    assert search(asked).best == search(asked).best


def test_a_plan_on_lost_devices_is_not_kept() -> None:
    current = colocated(grpo(), dp=4)
    asked = replace(problem(grpo(), cluster(4).without([3])), current=current)
    assert all(3 not in scored.plan.devices for scored in search(asked).best)
    with pytest.raises(InfeasibleError, match=r"devices \[3\]"):
        judge(asked, current)


@settings(max_examples=2, deadline=None)
@given(devices=st.integers(1, 3), capacity=st.integers(40_000, 150_000))
def test_when_nothing_fits_the_capacity_that_is_named_is_enough(devices: int, capacity: int) -> None:
    with pytest.raises(InfeasibleError) as error:
        search(problem(ppo(), cluster(devices, capacity)))
    words = str(error.value)
    assert error.value.exit_code == 3
    short = max(error.value.short_bytes.values())
    assert f"{short:,} bytes short" in words
    assert f"the smallest capacity that would do is {capacity + short:,} bytes" in words
    assert any(call.name in words for call in ppo().calls)
    assert search(problem(ppo(), cluster(devices, capacity + short))).best


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
    with pytest.raises(InfeasibleError, match=r"actor/training has no layout there \(needs 4 devices of 3\)"):
        search(problem(grpo(), cluster(3), able))


def test_heads_not_divisible_by_a_pinned_tp() -> None:
    """28 heads, 4 KV heads, TP pinned to 8 on 8 devices."""
    spec = replace(TINY, heads=28, kv_heads=4)
    able = Capabilities(pins={GENERATION: Pin(tp=8)})
    with pytest.raises(SettingsError, match=r"28 heads and 4 KV heads: valid TP 1, 2, 4$"):
        search(problem(grpo(spec), cluster(8), able))


def test_many_devices() -> None:
    """A thousand devices on nodes of eight, far more than there are sequences in a mini-batch."""
    devices = tuple(Device(index, index // 8, "cpu") for index in range(1024))
    base = cluster(1)
    asked = problem(
        ppo(SMALL), Cluster(devices, base.kinds, base.links), prompts=256, samples_per_prompt=2, mini_batch=128
    )
    best = search(asked, 2).best
    assert all(scored.estimate == asked.model().estimate(scored.plan) for scored in best)
