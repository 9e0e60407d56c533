"""Fig. 4b: which of its training plans of Llama-3.1-8B fit at which length, and which is fastest, on 64 GB A100.

Nothing is tuned: the machine type and the headroom are the product's own, ZeRO-0, micro-batch 1, no recomputation. Idle
weights of generation (TP 2) and of the reference (TP 4), 12 GB a device, stay beside training (paper §4.2).
"""

from __future__ import annotations

from functools import cache

import pytest

from nereus.clusters.named import machine
from nereus.core import (
    Assignment,
    Candidate,
    Capabilities,
    InfeasibleError,
    Layout,
    Lengths,
    ModelSpec,
    Plan,
    Workload,
)
from nereus.planning.judge import judge
from nereus.planning.problem import Problem
from tests.cost.jobs import ACTOR, GENERATION, REFERENCE, grpo

LLAMA_8B = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256, dtype="bf16")
PLANS = {
    8: ((1, 2, 4), (2, 4, 1)),
    16: ((2, 1, 8), (4, 2, 2), (2, 2, 4), (4, 4, 1), (2, 4, 2), (1, 4, 4)),
    32: ((4, 1, 8), (8, 2, 2), (4, 2, 4), (8, 4, 1), (4, 4, 2), (2, 4, 4)),
}
"""(DP, TP, PP) by number of devices."""


def problem(devices: int, tokens: int) -> Problem:
    """The job at one length. The paper does not give its batch; in small mini-batches gradients would weigh more."""
    workload = Workload(2048, 4, Lengths.constant(1), Lengths.constant(tokens - 1), 2048, tokens)
    return Problem(grpo(LLAMA_8B), workload, machine("a100-64x4", devices // 4), Capabilities(sequence_parallel=True))


def placed(candidate: Candidate) -> Assignment:
    size = candidate.layout.size
    return Assignment(candidate, tuple(tuple(range(i * size, (i + 1) * size)) for i in range(candidate.dp)))


def plan(devices: int, degrees: tuple[int, int, int], idle: bool = True) -> Plan:
    """Training on all devices; idle weights beside it, or (to see what they change) offloaded."""
    dp, tp, pp = degrees
    training = Candidate(ACTOR, Layout(tp, pp), dp, sequence_parallel=tp > 1)
    generation = Candidate(GENERATION, Layout(2, 1), devices // 2, 1, kv_bytes=1 << 30, offload=not idle)
    reference = Candidate(REFERENCE, Layout(4, 1), devices // 4, 1, offload=not idle)
    return Plan((placed(generation), placed(reference), placed(training)))


@cache
def step_s(devices: int, tokens: int) -> dict[tuple[int, int, int], float]:
    """Seconds of training by plan, of those that fit."""
    asked, found = problem(devices, tokens), {}
    for degrees in PLANS[devices]:
        try:
            scored = judge(asked, plan(devices, degrees))
        except InfeasibleError:
            continue
        found[degrees] = scored.estimate.call_s["update_actor"]
    return found


def fastest(devices: int, tokens: int) -> tuple[int, int, int]:
    times = step_s(devices, tokens)
    return min(times, key=times.__getitem__)


@pytest.mark.parametrize("tokens", [1024, 2048])
def test_short_sequences_train_fastest_with_little_tp(tokens: int) -> None:
    assert fastest(16, tokens) == (4, 2, 2)


def test_the_fastest_short_plan_runs_out_of_memory_at_4k() -> None:
    assert (4, 2, 2) in step_s(16, 2048)
    with pytest.raises(InfeasibleError, match="update_actor: activations"):
        judge(problem(16, 4096), plan(16, (4, 2, 2)))


def test_more_tp_takes_over_at_4k_and_costs_time_at_2k() -> None:
    assert fastest(16, 4096) == (4, 4, 1)
    assert step_s(16, 2048)[4, 4, 1] > step_s(16, 2048)[4, 2, 2]


def test_at_8k_only_tp_4_over_several_pp_ranks_fits() -> None:
    assert set(step_s(16, 8192)) == {(2, 4, 2), (1, 4, 4)}


def test_nothing_fits_8_devices_at_8k() -> None:
    assert step_s(8, 8192) == {}
    assert step_s(8, 1024)


def test_the_idle_weights_decide_at_4k() -> None:
    """Without them (4, 2, 2) would still fit."""
    assert judge(problem(16, 4096), plan(16, (4, 2, 2), idle=False))


def test_twice_the_replicas_have_the_same_boundary() -> None:
    """At 32 devices each plan is one of 16 with twice the replicas, and ZeRO-0 does not shard over them."""
    for tokens in (1024, 2048, 4096, 8192):
        assert {(dp // 2, tp, pp) for dp, tp, pp in step_s(32, tokens)} == set(step_s(16, tokens))
