"""Prices by column: a row costs what it costs alone and in a plan; synchronisation in parts; offload; kinds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import Calibration, Candidate, Cluster, Device, DeviceKind, Efficiency, Layout, ModelStage, Plan
from nereus.cost.operations import CLASSES
from nereus.cost.rows import Rows
from nereus.cost.schedule import SYNC
from nereus.cost.step import StepModel
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
MODEL = StepModel(ppo(SMALL), WORKLOAD, cluster(32))
STAGES = (GENERATION, REFERENCE, REWARD, ACTOR, CRITIC)


def row(model_stage: ModelStage, candidate: Candidate) -> Rows:
    return Rows.of([replace(candidate, model_stage=model_stage)], SMALL.layers, node_size=32)


@st.composite
def candidates(draw: st.DrawFn, most: int = 32) -> Candidate:
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    dp = draw(st.integers(1, max(1, min(4, most // (tp * pp)))))
    micro_batch, recompute = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from(["none", "full"]))
    return Candidate(ACTOR, Layout(tp, pp), dp, micro_batch, recompute, kv_bytes=draw(st.sampled_from([0, 1])))


@settings(max_examples=15, deadline=None)
@given(st.lists(candidates(), min_size=2, max_size=6), st.sampled_from(STAGES), st.sampled_from([4, 8, 32]))
def test_a_row_costs_the_same_alone_and_among_many(
    chosen: list[Candidate], model_stage: ModelStage, node_size: int
) -> None:
    together = MODEL.price(model_stage, Rows.of(chosen, SMALL.layers, node_size), "cpu")
    for index, candidate in enumerate(chosen):
        alone = MODEL.price(model_stage, Rows.of([candidate], SMALL.layers, node_size), "cpu")
        for call, seconds in alone.call_s.items():
            assert together.call_s[call][index] == pytest.approx(seconds[0], rel=1e-12)
        assert together.sync_s[index] == pytest.approx(alone.sync_s[0], rel=1e-12)
        assert together.resident_bytes[index] == alone.resident_bytes[0]
        assert together.transient_bytes[index] == alone.transient_bytes[0]


@settings(max_examples=15, deadline=None)
@given(st.lists(candidates(), min_size=5, max_size=5))
def test_a_plan_costs_what_its_rows_cost(chosen: list[Candidate]) -> None:
    """Seconds are the same; bytes of the rows are never less than those of any device."""
    own = {ms: replace(candidate, model_stage=ms) for ms, candidate in zip(STAGES, chosen, strict=True)}
    placed = Plan(
        tuple(
            replace(assignment(ms, each.layout.tp, each.layout.pp, each.dp), candidate=each) for ms, each in own.items()
        )
    )
    prices = {ms: MODEL.price(ms, row(ms, each), "cpu") for ms, each in own.items()}
    estimate = MODEL.estimate(placed)
    calls = {call: seconds[0] for price in prices.values() for call, seconds in price.call_s.items()}
    sync_s = sum(price.sync_s[0] for price in prices.values())
    assert estimate.call_s == pytest.approx({**calls, SYNC: sync_s}, rel=1e-9)
    # Everything starts on device 0, so all calls take turns.
    assert estimate.step_s == pytest.approx(sum(calls.values()) + sync_s, rel=1e-9)
    most = sum(price.resident_bytes[0] for price in prices.values())
    most += max(price.transient_bytes[0] for price in prices.values())
    assert max(estimate.peak_bytes.values()) <= most


def test_synchronisation_is_what_the_source_sends_and_the_target_receives() -> None:
    """Only the two sides of a synchronisation pay for it, and more devices on either side make it shorter."""
    prices = {ms: MODEL.price(ms, row(ms, Candidate(ms, Layout(), 1)), "cpu").sync_s[0] for ms in STAGES}
    assert {ms for ms, seconds in prices.items() if seconds} == {ACTOR, GENERATION}
    cut = {ms: MODEL.price(ms, row(ms, Candidate(ms, Layout(2), 1)), "cpu").sync_s[0] for ms in (ACTOR, GENERATION)}
    assert cut[ACTOR] == pytest.approx(prices[ACTOR] / 2)
    assert prices[GENERATION] / 2 < cut[GENERATION] < prices[GENERATION]


def test_the_seconds_of_a_synchronisation_by_hand() -> None:
    """Each of two source devices sends half of the model; the target receives all of it in messages and writes it."""
    model = StepModel(grpo(SMALL), WORKLOAD, cluster(4), PERFECT)
    query, keys, ffn, hidden, layers, vocab = 128, 64, 352, 128, 8, 512
    layer = 2 * hidden * query + 2 * hidden * keys + 3 * hidden * ffn + 2 * hidden
    whole = 4 * (layers * layer + 2 * vocab * hidden + hidden)
    expected = whole / 2 / 1.5e9 + whole / 1.5e9 + 9 * 8 * 1e-4 + whole / 4e9
    apart = plan(assignment(GENERATION, first=2), assignment(REFERENCE), assignment(ACTOR, dp=2))
    assert model.call_s(apart)[SYNC] == pytest.approx(expected)


def test_offload_trades_stored_bytes_for_time() -> None:
    """An offloaded model-stage stores nothing between calls. One that is not updated has nothing to put back."""
    model = StepModel(ppo(SMALL), WORKLOAD, cluster(2, host_bytes_per_s=1e9), PERFECT)
    stay, leave = (
        Candidate(REFERENCE, Layout(2), 1, offload=False),
        Candidate(REFERENCE, Layout(2), 1, offload=True),
    )
    before, after = (model.price(REFERENCE, row(REFERENCE, each), "cpu") for each in (stay, leave))
    stored = before.resident_bytes[0]
    assert after.resident_bytes[0] == 0
    assert after.transient_bytes[0] == before.transient_bytes[0] + stored
    extra_s = after.call_s["reference_log_probs"][0] - before.call_s["reference_log_probs"][0]
    assert extra_s == pytest.approx(stored / 1e9)


def test_what_is_updated_goes_back_to_the_host() -> None:
    model = StepModel(ppo(SMALL), WORKLOAD, cluster(2, host_bytes_per_s=1e9), PERFECT)
    stay, leave = (Candidate(ACTOR, Layout(2), 1, offload=each) for each in (False, True))
    before, after = (model.price(ACTOR, row(ACTOR, each), "cpu") for each in (stay, leave))
    stored = before.resident_bytes[0]
    assert after.call_s["update_actor"][0] - before.call_s["update_actor"][0] == pytest.approx(2 * stored / 1e9)


def test_offload_makes_room_for_the_others() -> None:
    model = StepModel(ppo(SMALL), WORKLOAD, cluster(2, host_bytes_per_s=1e9), PERFECT)
    stay = colocated(ppo(SMALL), tp=2)
    leave = Plan(
        tuple(
            replace(a, candidate=replace(a.candidate, offload=a.candidate.model_stage in (REFERENCE, REWARD)))
            for a in stay.assignments
        )
    )
    assert max(model.estimate(leave).peak_bytes.values()) < max(model.estimate(stay).peak_bytes.values())
    assert model.estimate(leave).step_s > model.estimate(stay).step_s
    assert "reference_log_probs:offload" in model.breakdown(leave)


def test_nothing_is_offloaded_where_there_is_no_way_to_host_memory() -> None:
    price = MODEL.price(REFERENCE, row(REFERENCE, Candidate(REFERENCE, Layout(), 1, offload=True)), "cpu")
    assert np.isinf(price.call_s["reference_log_probs"]).all()


def test_a_group_of_two_kinds_goes_at_the_pace_of_the_slower() -> None:
    fast = cluster(4, peak_flops={"fp32": 1e11}, launch_s=1e-6)
    slow = replace(fast.kinds["cpu"], name="old", peak_flops={"fp32": 1e10}, launch_s=1e-5)
    devices = (*(Device(index, 0, "cpu") for index in range(2)), *(Device(index, 0, "old") for index in range(2, 4)))
    mixed = Cluster(devices, {**fast.kinds, "old": slow}, fast.links)
    model = StepModel(ppo(SMALL), WORKLOAD, mixed)
    one = row(ACTOR, Candidate(ACTOR, Layout(2), 1))
    by_kind = {name: model.price(ACTOR, one, name).call_s["update_actor"][0] for name in ("cpu", "old")}
    both = model.price(ACTOR, one, ("cpu", "old")).call_s["update_actor"][0]
    assert by_kind["cpu"] < by_kind["old"] == pytest.approx(both)
    across = plan(*(assignment(ms, tp=2, first=1) for ms in STAGES))
    assert model.call_s(across)["update_actor"] == pytest.approx(both)


def test_a_workflow_says_what_products_of_a_model_stage_run_in() -> None:
    kind = DeviceKind("gpu", 10**12, {"fp32": 1e9, "bf16": 1e9, "fp8": 4e9}, 1e15, constants={"gemm.share": 1.0})
    pool = replace(cluster(2), kinds={"gpu": kind}, devices=tuple(Device(index, 0, "gpu") for index in range(2)))
    flow = ppo(SMALL)
    plain, low = (
        StepModel(replace(flow, precisions=precisions), WORKLOAD, pool, PERFECT)
        for precisions in ({}, {REFERENCE: "fp8"})
    )
    of_reference, of_actor = Candidate(REFERENCE, Layout(), 1), Candidate(ACTOR, Layout(), 1)
    rows = row(REFERENCE, of_reference)
    fast, slow = (model.price(REFERENCE, rows, "gpu").call_s["reference_log_probs"] for model in (low, plain))
    assert fast < slow
    assert fast == plain.price(REFERENCE, rows, "gpu", "fp8").call_s["reference_log_probs"]
    rows = row(ACTOR, of_actor)
    assert (
        low.price(ACTOR, rows, "gpu").call_s["update_actor"] == plain.price(ACTOR, rows, "gpu").call_s["update_actor"]
    )
