"""§3.2 and §4.2 on memory: what grows with the sequences, what a peak covers, and how feasibility is decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.core import Calibration, Candidate, Capabilities, InfeasibleError, Layout, Lengths, Work
from nereus.planning.judge import judge, misfit
from nereus.planning.problem import Problem
from tests.cost.jobs import ACTOR, GENERATION, WORKLOAD, cluster, colocated, grpo
from tests.cost.test_memory import LLAMA_8B, memory, terms


def test_longer_sequences_grow_the_cache_of_generation_and_the_activations_of_training() -> None:
    """§3.2: from 500 to 8,000 tokens in 1,000 steps."""

    def at(tokens: int) -> tuple[float, float]:
        of = memory(LLAMA_8B, workload=replace(WORKLOAD, response=Lengths.constant(tokens), max_response_tokens=8000))
        (cache,) = terms(of, Candidate(GENERATION, Layout(2, 1), 1, 8), Work.GENERATE)
        (update,) = terms(of, Candidate(ACTOR, Layout(2, 1), 1))
        return cache["kv cache"], update["activations"]

    for early, late in zip(at(500), at(8000), strict=True):
        assert late / early == pytest.approx(16, rel=0.03)


def test_a_plan_fits_with_a_tenth_of_every_device_left_free_and_not_with_less() -> None:
    job, plan = grpo(), colocated(grpo(), dp=2)
    needed = max(judge(Problem(job, WORKLOAD, cluster(2), Capabilities()), plan).estimate.peak_bytes.values())
    enough = -(-needed * 10 // 9)
    assert judge(Problem(job, WORKLOAD, cluster(2, memory_bytes=enough), Capabilities()), plan)
    with pytest.raises(InfeasibleError, match=f"the smallest capacity that would do is {enough:,} bytes"):
        judge(Problem(job, WORKLOAD, cluster(2, memory_bytes=enough - 2), Capabilities()), plan)


def test_what_the_runtime_takes_is_not_the_plans() -> None:
    job, plan = grpo(), colocated(grpo(), dp=2)
    needed = max(judge(Problem(job, WORKLOAD, cluster(2), Capabilities()), plan).estimate.peak_bytes.values())
    capacity, taken = needed * 4, {"context.bytes": needed * 2.0, "workspace.bytes": needed * 1.0}
    assert judge(Problem(job, WORKLOAD, cluster(2, memory_bytes=capacity), Capabilities()), plan)
    with pytest.raises(InfeasibleError):
        judge(Problem(job, WORKLOAD, cluster(2, memory_bytes=capacity, constants=taken), Capabilities()), plan)


def test_measured_peaks_decide_what_is_feasible() -> None:
    job, plan = grpo(), colocated(grpo(), dp=2)
    peak = max(judge(Problem(job, WORKLOAD, cluster(2), Capabilities()), plan).estimate.peak_bytes.values())
    tight = Problem(job, WORKLOAD, cluster(2, memory_bytes=-(-peak * 10 // 9)), Capabilities())
    assert misfit(tight, tight.model(), plan) is None
    learnt = replace(tight, calibration=Calibration(memory_scale=1.2, memory_count=3))
    assert misfit(learnt, learnt.model(), plan) is not None
