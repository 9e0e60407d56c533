"""Bytes per device: per pp rank, per recompute mode, with idle co-residents."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.core import Calibration, Candidate, Layout, Lengths, ModelSpec, Work, Workload, expand
from nereus.cost.memory import resident_bytes, sequence_kv_bytes, transient_bytes
from nereus.cost.state import schema
from nereus.cost.step import StepModel
from tests.cost.jobs import ACTOR, CRITIC, GENERATION, REFERENCE, SMALL, WORKLOAD, cluster, colocated, grpo, ppo


def parameters(spec: ModelSpec) -> int:
    """Elements of an untied dense model, written down from its sizes."""
    query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = spec.hidden * (query + 2 * keys) + query * spec.hidden + 3 * spec.hidden * spec.ffn_hidden + 2 * spec.hidden
    return spec.layers * layer + 2 * spec.vocab * spec.hidden + spec.hidden


def test_llama_3_1_8b_has_the_published_size() -> None:
    spec = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256, dtype="bf16")
    whole = Candidate(ACTOR, Layout(), 1)
    assert parameters(spec) == 8_030_261_248
    assert resident_bytes(schema(spec, trained=False), whole, 0, 0) == 2 * parameters(spec)
    # bf16 parameter, fp32 master and two moments
    assert resident_bytes(schema(spec, trained=True), whole, 0, 0) == 14 * parameters(spec)


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 3), Layout(4, 2), Layout(2, 3)])
def test_resident_bytes_are_those_of_the_schema(layout: Layout) -> None:
    job = grpo(SMALL)
    model = StepModel(job, WORKLOAD, cluster(8))
    for model_stage in job.model_stages:
        candidate = Candidate(model_stage, layout, 1)
        plan = colocated(job, tp=layout.tp, pp=layout.pp)
        (unit,) = expand(plan).of(model_stage)
        expected = tuple(model.schemas[model_stage].stored_bytes(unit, device) for device in unit.devices)
        assert model.resident(candidate) == expected


def test_first_and_last_pp_rank_differ() -> None:
    candidate = Candidate(ACTOR, Layout(1, 4), 1, micro_batch=2)
    terms = [transient_bytes(SMALL, candidate, WORKLOAD, Work.UPDATE, rank, 1000) for rank in range(4)]
    assert terms[0]["logits"] == 0 < terms[3]["logits"]
    # 1F1B: the first rank holds most micro-batches in flight, the last one; a mini-batch of 4 has two of them
    assert terms[0]["activations"] == terms[1]["activations"]
    assert terms[2]["activations"] == terms[0]["activations"]
    assert terms[3]["activations"] < terms[2]["activations"]


def test_micro_batches_in_flight_are_limited_by_the_rank_and_by_their_number() -> None:
    workload = replace(WORKLOAD, prompts=16, mini_batch=16)
    candidate = Candidate(ACTOR, Layout(1, 4), 1, micro_batch=1)
    sizes = [transient_bytes(SMALL, candidate, workload, Work.UPDATE, rank)["activations"] / 2 for rank in range(3)]
    assert sizes[0] / sizes[1] == pytest.approx(4 / 3)
    assert sizes[1] / sizes[2] == pytest.approx(3 / 2)


def test_recompute_changes_the_estimate_a_lot() -> None:
    """32k tokens through 64 layers of hidden 5,120 at TP 2: hundreds of gigabytes or a few dozen."""
    spec = ModelSpec("llama", 64, 5120, 40, 8, 128, 27648, 152064, dtype="bf16")
    workload = Workload(1, 1, Lengths.constant(512), Lengths.constant(32_198), 1, 32_768)

    def activations(recompute: str) -> int:
        candidate = Candidate(ACTOR, Layout(2, 1), 1, recompute=recompute)
        terms = transient_bytes(spec, candidate, workload, Work.UPDATE, 0)
        return terms["activations"] + terms["recomputed layer"]

    assert activations("none") > 107e9
    assert activations("selective") > 107e9
    assert activations("full") < 0.2 * activations("selective")


def test_activations_of_one_layer_counted_by_hand() -> None:
    """fp32, one layer: 6 hidden + 2 query + 2 keys + 4 ffn, and the final norm's 3 hidden, for every token."""
    spec = ModelSpec("llama", 1, 128, 8, 4, 32, 352, 96)
    workload = Workload(4, 1, Lengths.constant(16), Lengths.constant(48), 4, 48)
    terms = transient_bytes(spec, Candidate(ACTOR, Layout(), 1, micro_batch=4), workload, Work.UPDATE, 0)
    a_token = 6 * 128 + 2 * 256 + 2 * 128 + 4 * 352 + 3 * 128
    assert terms["activations"] == 4 * 64 * a_token * 4


def test_gradients_exist_during_an_update_only() -> None:
    candidate = Candidate(ACTOR, Layout(), 1)
    assert transient_bytes(SMALL, candidate, WORKLOAD, Work.UPDATE, 0, 12345)["gradients"] == 12345
    assert "gradients" not in transient_bytes(SMALL, candidate, WORKLOAD, Work.FORWARD, 0, 12345)


def test_the_kv_cache_grows_in_blocks_to_the_longest_sequence() -> None:
    workload = Workload(4, 1, Lengths.constant(10), Lengths(5, 7, 9), 4, 32)
    candidate = Candidate(GENERATION, Layout(2, 1), 1, micro_batch=4)
    terms = transient_bytes(SMALL, candidate, workload, Work.GENERATE, 0)
    # 19 tokens need two blocks of 16; 2 of 4 KV heads of 16, keys and values, 8 layers, fp32
    assert terms["kv cache"] == 4 * 32 * 2 * 2 * 16 * 8 * 4


def test_finished_sequences_leave_the_kv_cache() -> None:
    tail = Lengths.measured([16] * 31 + [512])
    workload = Workload(32, 1, Lengths.constant(16), tail, 32, 512)
    candidate = Candidate(GENERATION, Layout(), 1, micro_batch=32)
    measured = transient_bytes(SMALL, candidate, workload, Work.GENERATE, 0)["kv cache"]
    unknown = replace(workload, response=replace(tail, quantiles=()))
    assert measured < 0.3 * transient_bytes(SMALL, candidate, unknown, Work.GENERATE, 0)["kv cache"]


def test_a_kv_budget_limits_the_cache() -> None:
    one = sequence_kv_bytes(SMALL, Layout(), WORKLOAD)
    free = Candidate(GENERATION, Layout(), 1, micro_batch=8)
    limited = replace(free, micro_batch=2, kv_bytes=2 * one)
    unlimited_bytes, limited_bytes = (
        transient_bytes(SMALL, each, WORKLOAD, Work.GENERATE, 0)["kv cache"] for each in (free, limited)
    )
    assert (unlimited_bytes, limited_bytes) == (8 * one, 2 * one)


def test_idle_model_stages_count_on_every_device() -> None:
    """The engine that wakes on a device finds the optimizer state of training still there."""
    job = ppo(SMALL)
    model = StepModel(job, WORKLOAD, cluster(2))
    plan = colocated(job, dp=2, micro_batch=1)
    peak = model.estimate(plan).peak_bytes[0]
    stored = sum(model.resident(plan.of(model_stage).candidate)[0] for model_stage in job.model_stages)
    largest = max(
        sum(model.transient(plan.of(call.model_stage).candidate, call.name, 0).values()) for call in job.calls
    )
    assert peak == stored + largest
    alone = model.resident(plan.of(GENERATION).candidate)[0]
    assert stored > 6 * alone


def test_disjoint_model_stages_do_not_add_up() -> None:
    job = ppo(SMALL)
    model = StepModel(job, WORKLOAD, cluster(2))
    plan = colocated(job)
    moved = replace(
        plan,
        assignments=tuple(
            replace(a, units=((1,),)) if a.candidate.model_stage in (CRITIC, REFERENCE) else a for a in plan.assignments
        ),
    )
    before, after = model.estimate(plan).peak_bytes, model.estimate(moved).peak_bytes
    assert after[0] < before[0]
    assert max(after.values()) < before[0]


def test_calibration_scales_the_transient_part_alone() -> None:
    job = grpo(SMALL)
    plan = colocated(job)
    plain = StepModel(job, WORKLOAD, cluster(1)).peaks(plan)[0]
    scaled = StepModel(job, WORKLOAD, cluster(1), Calibration(memory_scale=2.0)).peaks(plan)[0]
    assert scaled.resident_bytes == plain.resident_bytes
    assert scaled.transient_bytes == 2 * plain.transient_bytes


def test_a_peak_names_its_call_and_term() -> None:
    job = grpo(SMALL)
    long = replace(WORKLOAD, response=Lengths.constant(2000), max_response_tokens=2000)
    limits = StepModel(job, long, cluster(1)).estimate(colocated(job, micro_batch=4)).limits
    assert "update_actor: activations" in limits[0]
    assert "stored" in limits[0]
