"""Seconds of a step: overlap, turns, monotonicity, and agreement between the answers of one model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import Calibration, Efficiency, Lengths
from nereus.cost.operations import CLASSES, START_EFFICIENCY
from nereus.cost.site import KNOWN_VARIANCE
from nereus.cost.step import UNMODELLED, StepModel
from tests.cost.jobs import (
    ACTOR,
    CRITIC,
    GENERATION,
    REFERENCE,
    REWARD,
    SMALL,
    WORKLOAD,
    assignment,
    cluster,
    colocated,
    grpo,
    plan,
    ppo,
)

PERFECT = Calibration({name: Efficiency(1.0, 1, 0.0) for name in CLASSES})


def model(devices: int = 4, calibration: Calibration | None = None, **changes: Any) -> StepModel:
    return StepModel(grpo(SMALL), replace(WORKLOAD, **changes), cluster(devices), calibration)


def test_calls_that_share_devices_take_turns() -> None:
    estimate = model(1).estimate(colocated(grpo(SMALL)))
    assert estimate.step_s == pytest.approx(sum(estimate.call_s.values()))
    assert estimate.critical_path == ("generate", "reference_log_probs", "old_log_probs", "update_actor", "sync")


def test_calls_on_disjoint_devices_overlap() -> None:
    """Reference and old log-probs wait for generation alone, so on two devices they run side by side."""
    together = plan(assignment(GENERATION), assignment(REFERENCE, first=0), assignment(ACTOR, first=0))
    apart = plan(assignment(GENERATION), assignment(REFERENCE, first=1), assignment(ACTOR, first=0))
    step = model(2)
    call_s = step.call_s(together)
    gain = step.estimate(together).step_s - step.estimate(apart).step_s
    assert gain == pytest.approx(min(call_s["reference_log_probs"], call_s["old_log_probs"]))


def test_the_five_model_stages_of_ppo_on_disjoint_halves() -> None:
    job = ppo(SMALL)
    halves = plan(
        assignment(GENERATION, dp=4),
        assignment(REFERENCE, dp=2),
        assignment(REWARD, dp=2, first=2),
        assignment(ACTOR, dp=2),
        assignment(CRITIC, dp=2, first=2),
    )
    estimate = StepModel(job, WORKLOAD, cluster(4)).estimate(halves)
    s = estimate.call_s
    left = s["reference_log_probs"] + s["old_log_probs"]
    right = s["reward_scores"] + s["values"]
    expected = s["generate"] + max(left, right) + max(s["update_actor"], s["update_critic"]) + s["sync"]
    assert estimate.step_s == pytest.approx(expected)


def test_breakdown_and_calls_agree() -> None:
    """Without residuals, a call takes its ideal seconds divided by the efficiency of each class."""
    step = model()
    layouts = colocated(grpo(SMALL), tp=2, dp=2)
    ideal, call_s = step.breakdown(layouts), step.call_s(layouts)
    assert {key.split(":")[1] for key in ideal} <= set(CLASSES)
    for call, seconds in call_s.items():
        parts = [s / START_EFFICIENCY for key, s in ideal.items() if key.startswith(f"{call}:")]
        assert seconds == pytest.approx(sum(parts))


def test_a_paced_device_computes_at_its_share_but_its_links_do_not_slow_down() -> None:
    full = StepModel(grpo(SMALL), WORKLOAD, cluster(2)).breakdown(colocated(grpo(SMALL), tp=2))
    paced = StepModel(grpo(SMALL), WORKLOAD, cluster(2, speed=0.25)).breakdown(colocated(grpo(SMALL), tp=2))
    for key, seconds in full.items():
        slower = 4 if key.split(":")[1] in ("decode", "prefill", "forward", "backward", "optimizer") else 1
        if not key.startswith("sync"):
            assert paced[key] == pytest.approx(slower * seconds), key


def test_the_slowest_unit_has_the_larger_share() -> None:
    """Eight sequences over three units: as slow as a unit with three of nine."""
    eight, nine = model(3), model(3, prompts=9, samples_per_prompt=1, mini_batch=9)
    layouts = colocated(grpo(SMALL), dp=3)
    key = "reference_log_probs"
    assert eight.call_s(layouts)[key] == pytest.approx(nine.call_s(layouts)[key])


def test_a_bubble_costs_one_micro_batch_of_the_other_ranks() -> None:
    """Four micro-batches through four equal ranks: seven turns, of which one rank computes four."""
    spec = replace(SMALL, vocab=8)
    step = StepModel(grpo(spec), replace(WORKLOAD, mini_batch=8), cluster(4), PERFECT)
    ideal = step.breakdown(colocated(grpo(spec), pp=4, micro_batch=2))
    transfers = 2 * 4 * (2 * 32 * 128 * 4 / 1.5e9 + 1e-4)
    compute = ideal["reference_log_probs:forward"]
    assert ideal["reference_log_probs:pp"] == pytest.approx(compute * 3 / 4 + transfers, rel=0.2)


def test_the_busiest_rank_of_thirty_layers_on_four_has_eight() -> None:
    spec = replace(SMALL, layers=30, vocab=8)
    layout = colocated(grpo(spec), pp=4).assignments[0].candidate.layout
    assert [len(layout.layers_of(rank, 30)) for rank in range(4)] == [8, 8, 7, 7]
    uneven = StepModel(grpo(spec), WORKLOAD, cluster(4), PERFECT).breakdown(colocated(grpo(spec), pp=4))
    even_spec = replace(spec, layers=32)
    even = StepModel(grpo(even_spec), WORKLOAD, cluster(4), PERFECT).breakdown(colocated(grpo(even_spec), pp=4))
    key = "reference_log_probs:forward"
    assert uneven[key] == pytest.approx(even[key], rel=1e-2)


def test_decoding_follows_the_tail_not_the_mean() -> None:
    short = model(response=Lengths(12, 13, 14)).call_s(colocated(grpo(SMALL)))["generate"]
    tail = model(response=Lengths(12, 24, 48)).call_s(colocated(grpo(SMALL)))["generate"]
    assert tail > 2 * short


def test_a_kv_budget_decodes_in_waves() -> None:
    step = model()
    whole = step.call_s(colocated(grpo(SMALL), micro_batch=8))["generate"]
    waves = step.call_s(colocated(grpo(SMALL), micro_batch=2, kv_bytes=1))["generate"]
    assert waves > 2 * whole


def test_tp_across_nodes_is_slower_than_inside_one() -> None:
    layouts = colocated(grpo(SMALL), tp=2)
    inside = StepModel(grpo(SMALL), WORKLOAD, cluster(2)).breakdown(layouts)
    across = StepModel(grpo(SMALL), WORKLOAD, cluster(2, nodes=2)).breakdown(layouts)
    assert across["generate:tp"] > 3 * inside["generate:tp"]
    assert across["generate:decode"] == pytest.approx(inside["generate:decode"])


def test_residuals_scale_their_call() -> None:
    slow = Calibration({"call:generate": Efficiency(1.5, 3, 0.01)})
    before, after = (model(calibration=c).call_s(colocated(grpo(SMALL))) for c in (None, slow))
    assert after["generate"] == pytest.approx(1.5 * before["generate"])
    assert after["update_actor"] == before["update_actor"]


def test_unseen_classes_carry_wide_uncertainty() -> None:
    fresh = model(1).estimate(colocated(grpo(SMALL)))
    known = model(1, PERFECT).estimate(colocated(grpo(SMALL)))
    assert fresh.uncertainty > 0.2
    assert known.uncertainty == 0
    assert fresh.step_s > known.step_s


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 3),
    dp=st.integers(1, 4),
    micro_batch=st.sampled_from([1, 2, 4]),
    longer=st.floats(1.0, 3.0),
)
def test_longer_responses_never_take_less_time_or_memory(
    tp: int, pp: int, dp: int, micro_batch: int, longer: float
) -> None:
    layouts = colocated(grpo(SMALL), tp=tp, pp=pp, dp=dp, micro_batch=micro_batch)
    lengths = Lengths(12 * longer, 18 * longer, 24 * longer)
    short, long = model(48).estimate(layouts), model(48, response=lengths).estimate(layouts)
    assert long.step_s >= short.step_s * (1 - 1e-12)
    assert all(long.peak_bytes[d] >= short.peak_bytes[d] for d in short.peak_bytes)


@settings(max_examples=40, deadline=None)
@given(speed=st.floats(0.1, 1.0), factor=st.floats(1.0, 4.0), tp=st.sampled_from([1, 2]), pp=st.integers(1, 2))
def test_faster_devices_never_take_longer(speed: float, factor: float, tp: int, pp: int) -> None:
    layouts = colocated(grpo(SMALL), tp=tp, pp=pp)
    slow = StepModel(grpo(SMALL), WORKLOAD, cluster(4, speed=speed / factor)).estimate(layouts)
    fast = StepModel(grpo(SMALL), WORKLOAD, cluster(4, speed=speed)).estimate(layouts)
    assert fast.step_s <= slow.step_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 3),
    recompute=st.sampled_from(["none", "full"]),
    more=st.sampled_from(["layers", "ffn_hidden", "vocab", "prompts", "epochs"]),
)
def test_more_work_never_takes_less(tp: int, pp: int, recompute: str, more: str) -> None:
    layouts = colocated(grpo(SMALL), tp=tp, pp=pp, micro_batch=2, recompute=recompute)
    if hasattr(SMALL, more):
        spec, work = replace(SMALL, **{more: 2 * getattr(SMALL, more)}), WORKLOAD
    else:
        spec, work = SMALL, replace(WORKLOAD, **{more: 2 * getattr(WORKLOAD, more)})
    before = StepModel(grpo(SMALL), WORKLOAD, cluster(12)).call_s(layouts)
    after = StepModel(grpo(spec), work, cluster(12)).call_s(layouts)
    assert all(after[call] >= seconds * (1 - 1e-12) for call, seconds in before.items())
    assert after["update_actor"] > before["update_actor"]


def test_a_step_that_nobody_measured_is_uncertain_beyond_its_kernels() -> None:
    """With fitted constants every class is known to a tenth; what no class stands for goes with first observations."""
    pool = cluster(4)
    fitted = replace(
        pool, kinds={name: replace(kind, constants={"gemm.share": 0.8}) for name, kind in pool.kinds.items()}
    )
    placed = colocated(ppo(SMALL), tp=2)
    fresh = StepModel(ppo(SMALL), WORKLOAD, fitted).estimate(placed).uncertainty
    seen = Calibration({name: Efficiency(1.0, 1, KNOWN_VARIANCE) for name in CLASSES})
    of_classes = StepModel(ppo(SMALL), WORKLOAD, fitted, seen).estimate(placed).uncertainty
    assert fresh == pytest.approx(math.hypot(of_classes, UNMODELLED))
