"""What people who run such jobs reported about plans, batches and memory, as small inputs and the right outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nereus.clusters.named import machine
from nereus.core import (
    Assignment,
    Candidate,
    Capabilities,
    Cluster,
    InfeasibleError,
    Layout,
    Lengths,
    ModelSpec,
    ModelStage,
    Pin,
    Plan,
    SettingsError,
    Workload,
)
from nereus.cost.cache import kv_token_bytes
from nereus.cost.rows import Rows
from nereus.cost.step import StepModel
from nereus.families import expert_fault, legal_ep
from nereus.families.models import named
from nereus.planning.judge import Scored, judge
from nereus.planning.legal import check_pins, legal_tp
from nereus.planning.problem import Problem
from nereus.planning.search import SearchResult, search
from tests.cost.jobs import ACTOR, GENERATION, REFERENCE, SMALL, TINY, cluster, grpo

H100_BYTES = 80 * 2**30


def workload(sequences: int, mini_batch: int, samples: int = 1, tokens: int = 64) -> Workload:
    half = Lengths.constant(tokens // 2)
    return Workload(sequences // samples, samples, half, half, mini_batch, tokens // 2)


def problem(
    spec: ModelSpec,
    pool: Cluster,
    work: Workload,
    pins: dict[ModelStage, Pin] | None = None,
    **able: Any,
) -> Problem:
    return Problem(grpo(spec), work, pool, Capabilities(pins=pins or {}, **able))


def placed(candidate: Candidate, *devices: int) -> Assignment:
    """Units on consecutive devices, from the first of `devices` (or 0) on."""
    size, first = candidate.layout.size, devices[0] if devices else 0
    return Assignment(
        candidate, tuple(tuple(range(first + i * size, first + (i + 1) * size)) for i in range(candidate.dp))
    )


def colocated(*candidates: Candidate) -> Plan:
    return Plan(tuple(placed(candidate) for candidate in candidates))


# Plans that cannot exist


def test_28_heads_on_tp_8_are_refused_with_the_valid_degrees() -> None:
    """vllm#11797, vllm#2652: an error deep in the engine."""
    spec = ModelSpec("qwen2", 2, 448, 28, 4, 16, 128, 256, qkv_bias=True)
    asked = problem(spec, cluster(8), workload(16, 8), {ACTOR: Pin(tp=8)})
    with pytest.raises(SettingsError, match=r"tp pinned to 8.*28 heads.*valid TP 1, 2, 4$"):
        search(asked)
    free = search(problem(spec, cluster(8), workload(16, 8)))
    assert not {a.candidate.layout.tp for s in free.best for a in s.plan.assignments} - {1, 2, 4}


def test_40_heads_on_3_devices_plan_for_what_divides() -> None:
    """vllm#414, vllm#596: a node with 3 devices."""
    spec = ModelSpec("llama", 4, 320, 40, 40, 8, 128, 256)
    found = search(problem(spec, cluster(3), workload(12, 6)))
    assert all(40 % a.candidate.layout.tp == 0 for s in found.best for a in s.plan.assignments)
    two = search(problem(spec, cluster(3), workload(12, 6), {ms: Pin(tp=2) for ms in grpo().model_stages}))
    (assignment, *_) = two.best[0].plan.assignments
    assert (assignment.candidate.dp, len(assignment.devices)) == (1, 2)


def test_fewer_kv_heads_than_tp_ranks_are_replicated_and_counted() -> None:
    """transformers#48307: loads and shards, then dies in the first forward. Qwen3-30B-A3B has 32 heads, 4 KV heads."""
    spec = named("qwen3-30b-a3b")
    assert (spec.heads, spec.kv_heads) == (32, 4)
    assert 8 in legal_tp(problem(spec, machine("h100x8"), workload(16, 8)), ACTOR)
    by_tp = kv_token_bytes(spec, np.array([4, 8]), np.array(spec.layers), {}).tolist()
    assert by_tp[0] == by_tp[1] == 2 * spec.head_dim * spec.layers * 2


@pytest.mark.parametrize(("vocabulary", "heads", "tp"), [(32_001, 4, 2), (151_936, 6, 3)])
def test_a_vocabulary_that_tp_does_not_divide_is_padded_and_the_padding_counted(
    vocabulary: int, heads: int, tp: int
) -> None:
    """vllm#440, sglang#31799, TensorRT-LLM#98."""
    spec = ModelSpec("llama", 2, 48, heads, heads, 8, 64, vocabulary)
    work = workload(8, 4)
    rows = -(-vocabulary // tp)
    assert rows * tp > vocabulary
    layer = 48 * 8 * heads // tp * 4 + 3 * 48 * -(-64 // tp) + 2 * 48
    elements = 2 * rows * 48 + 2 * layer + 48
    candidates = [Candidate(ms, Layout(tp, 1), 1) for ms in (GENERATION, REFERENCE, ACTOR)]
    peak = StepModel(grpo(spec), work, cluster(tp)).peaks(colocated(*candidates))[tp - 1]
    # fp32 weights of generation and reference; weights and two moments of training
    assert peak.resident_bytes == elements * (4 + 4 + 12)


def test_30_layers_on_4_pp_ranks_are_split_and_every_split_must_sum_up() -> None:
    """Megatron-LM#1304, #468: 30 layers on PP 4 silently trained 28."""
    spec = replace(SMALL, layers=30)
    assert [len(Layout(1, 4).layers_of(rank, 30)) for rank in range(4)] == [8, 8, 7, 7]
    asked = problem(spec, cluster(4), workload(8, 4))
    others = [Candidate(ms, Layout(), 1) for ms in (GENERATION, REFERENCE)]
    assert judge(asked, colocated(*others, Candidate(ACTOR, Layout(1, 4), 1)))
    with pytest.raises(SettingsError, match=r"\(7, 7, 7, 7\) sum to 28, the model has 30"):
        judge(asked, colocated(*others, Candidate(ACTOR, Layout(1, 4, (7, 7, 7, 7)), 1)))


def test_61_layers_on_16_pp_ranks_count_their_widest() -> None:
    """ms-swift#5737: shipped recipes of PP 8 for 60 layers could not start. DeepSeek-V3 in verl's script: PP 16."""
    spec = named("deepseek-v3")
    assert spec.layers == 61
    free, explicit = (
        Rows.of([Candidate(ACTOR, Layout(8, 16, layers), 1, ep=8)], 61, 8) for layers in (None, (3, *(4,) * 14, 2))
    )
    assert (free.layers_first[0], free.layers_middle[0], free.layers_last[0]) == (4, 4, 3)
    assert (explicit.layers_first[0], explicit.layers_middle[0], explicit.layers_last[0]) == (3, 4, 2)


@pytest.mark.parametrize(("tp", "dp", "ep", "valid"), [(4, 1, 8, "1, 2, 4"), (8, 12, 48, "1, 2, 4, 8, 16, 32")])
def test_one_rule_and_one_message_for_expert_parallelism(tp: int, dp: int, ep: int, valid: str) -> None:
    """Megatron-Bridge#546, DeepSpeed PR#7551: EP divides dp * cp * tp and the number of experts (here 128)."""
    spec = named("qwen3-30b-a3b")
    assert expert_fault(spec, 4, 1, 1, 4) is None
    fault = expert_fault(spec, ep, dp, 1, tp)
    assert fault is not None
    assert f"ep {ep} must divide dp * cp * tp" in fault
    assert fault.endswith(f"and the 128 experts: valid EP {valid}")
    assert all(128 % each == 0 and (dp * tp) % each == 0 for each in legal_ep(spec, dp * tp))


def test_a_pool_smaller_than_asked_is_planned_or_refused_with_both_numbers() -> None:
    """verl#2515, verl#5954: total available 8 < desired 16; 7 < 8, and a silent wait for ever."""
    seven = search(problem(TINY, cluster(7), workload(14, 14)))
    assert len(seven.best[0].plan.devices) <= 7
    pinned = problem(TINY, cluster(7), workload(16, 16), {ACTOR: Pin(tp=1, pp=1, dp=8)})
    with pytest.raises((SettingsError, InfeasibleError), match=r"8 devices(.|\n)*7"):
        search(pinned)
    gone = problem(TINY, cluster(7), workload(14, 14), {ACTOR: Pin(devices=tuple(range(8)))})
    with pytest.raises(SettingsError, match=r"pinned to devices \[7\], there are \[0, 1, 2, 3, 4, 5, 6\]"):
        search(gone)


# Batch arithmetic: whole dp * micro-batch * accumulation, as `batch: exact` asks


def dp_degrees(found: SearchResult) -> set[int]:
    return {s.plan.of(ACTOR).candidate.dp for s in found.best}


def exact(sequences: int, mini_batch: int, devices: int, pin: Pin | None = None, samples: int = 1) -> Problem:
    return problem(
        TINY,
        cluster(devices),
        workload(sequences, mini_batch, samples),
        {ACTOR: pin} if pin else {},
        uneven_shares=False,
    )


def test_replicas_that_do_not_divide_the_batch_are_not_offered() -> None:
    """OpenRLHF#346: 256 != 2 x 18 x 7. With uneven shares 7 is legal, and the batch stays 256."""
    assert 7 not in dp_degrees(search(exact(256, 256, 7, Pin(tp=1, pp=1)), k=8))
    with pytest.raises(SettingsError, match=r"dp pinned to 7.*256 sequences: the nearest valid DP are 4 and 8"):
        check_pins(exact(256, 256, 7, Pin(tp=1, pp=1, dp=7)))
    uneven = search(problem(TINY, cluster(7), workload(256, 256), {ACTOR: Pin(tp=1, pp=1, dp=7)}))
    assert dp_degrees(uneven) == {7}


def test_a_micro_batch_above_the_share_is_refused() -> None:
    """verl PR#833: mini 64, dp 32, micro 16 gave NaN gradients: 64 / 32 = 2 < 16."""
    with pytest.raises(SettingsError, match=r"micro_batch pinned to 16.*2 sequences at dp 32.*1 to 2"):
        check_pins(exact(64, 64, 32, Pin(dp=32, micro_batch=16)))


def test_replicas_micro_batch_and_accumulation_make_the_batch() -> None:
    """L05: a global batch of 24 as 2 x 3 x 4 and as 4 x 3 x 2; 5 replicas and micro-batches of 5 are refused."""
    for dp, accumulation in ((2, 4), (4, 2)):
        asked = exact(24, 24, 8, Pin(tp=1, pp=1, dp=dp, micro_batch=3))
        check_pins(asked)
        (found,) = {s.plan.of(ACTOR).candidate for s in search(asked).best}
        assert found.dp * found.micro_batch * accumulation == 24
    with pytest.raises(SettingsError, match=r"dp pinned to 5.*24 sequences: the nearest valid DP are 4 and 6"):
        check_pins(exact(24, 24, 8, Pin(dp=5)))
    with pytest.raises(SettingsError, match=r"micro_batch pinned to 5.*12 sequences at dp 2.*are 4 and 6"):
        check_pins(exact(24, 24, 8, Pin(dp=2, micro_batch=5)))
    with pytest.raises(SettingsError, match=r"the nearest valid DP are 5 and 8"):
        check_pins(exact(10**9, 10**9, 8, Pin(dp=7)))


def test_a_mini_batch_smaller_than_its_replicas_is_refused() -> None:
    """verl PR#552: mini 4, n 1, dp 8 became a mini-batch of 0 and an endless loop."""
    with pytest.raises(SettingsError, match=r"dp pinned to 8.*4 sequences.*DP 1 to 4"):
        check_pins(exact(4, 4, 8, Pin(dp=8)))


def test_12_replicas_of_a_batch_of_1024_are_not_in_the_space() -> None:
    """verl PR#1811: batch % (dp x micro) was not checked, and uneven chunks were split silently."""
    found = search(exact(1024, 1024, 12, Pin(tp=1, pp=1)), k=8)
    assert dp_degrees(found) <= {1, 2, 4, 8}
    for scored in found.best:
        candidate = scored.plan.of(ACTOR).candidate
        assert 1024 % (candidate.dp * candidate.micro_batch) == 0


def test_a_lost_replica_keeps_the_batch_whole() -> None:
    """torchft#302: 16 = 4 x replicas x accumulation has no whole number at 3 replicas: go to 2."""
    before = colocated(*(Candidate(ms, Layout(), 4, 4) for ms in (GENERATION, REFERENCE, ACTOR)))
    asked = exact(16, 16, 4, Pin(tp=1, pp=1, micro_batch=4))
    assert judge(asked, before)
    left = replace(asked, cluster=asked.cluster.without({3}))
    candidate = search(left).best[0].plan.of(ACTOR).candidate
    assert (candidate.dp, candidate.micro_batch) == (2, 4)
    assert candidate.dp * candidate.micro_batch * 2 == 16


# Memory


def test_recomputation_decides_whether_32k_tokens_fit() -> None:
    """ART#913: admitted at "5.9 GB", real use above 107 GB: the estimate ignored the recompute setting."""
    spec = ModelSpec("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, dtype="bf16", qkv_bias=True)
    work = Workload(16, 1, Lengths.constant(512), Lengths.constant(32_198), 16, 32_768)
    asked = problem(spec, machine("h200x8", 2), work, recompute=("none", "selective", "full"))

    def plan(recompute: str) -> Plan:
        generation = Candidate(GENERATION, Layout(8, 1), 2, 1, kv_bytes=1 << 30)
        reference = Candidate(REFERENCE, Layout(8, 1), 2, 1)
        return colocated(generation, reference, Candidate(ACTOR, Layout(8, 2), 1, recompute=recompute))

    for recompute in ("none", "selective"):
        with pytest.raises(InfeasibleError, match="update_actor: activations"):
            judge(asked, plan(recompute))
    fits = judge(asked, plan("full"))
    assert max(fits.estimate.peak_bytes.values()) <= 0.9 * 141 * 2**30


def test_a_colocated_engine_with_a_large_cache_is_refused_beside_the_optimizer() -> None:
    """lmm-r1#43, verl#2245: out of memory when the engine wakes; optimizer not offloaded, KV share 0.6."""
    spec = named("llama-3.1-8b")
    asked = problem(spec, machine("h100x8"), workload(64, 64, tokens=4096), offload=True)
    generation = Candidate(GENERATION, Layout(4, 1), 2, 32, kv_bytes=int(0.6 * H100_BYTES))
    reference = Candidate(REFERENCE, Layout(4, 1), 2)
    training = Candidate(ACTOR, Layout(4, 1), 2, recompute="full", sequence_parallel=True)
    with pytest.raises(InfeasibleError, match="generate: kv cache 48 GiB"):
        judge(asked, colocated(generation, reference, training))
    assert isinstance(judge(asked, colocated(generation, reference, replace(training, offload=True))), Scored)
    small = replace(generation, micro_batch=8, kv_bytes=int(0.3 * H100_BYTES))
    assert isinstance(judge(asked, colocated(small, reference, training)), Scored)


def test_pp_ranks_have_peaks_of_their_own() -> None:
    """Megatron-LM#525, PR#482: one estimate of 70 GB where ranks need 20 and 50."""
    spec = named("llama-3.1-8b")
    work = workload(16, 16, tokens=8192)
    asked = Problem(grpo(spec), work, machine("h200x8"), Capabilities())
    plan = colocated(
        Candidate(GENERATION, Layout(8, 1), 1, 1, kv_bytes=1 << 30),
        Candidate(REFERENCE, Layout(8, 1), 1, 1),
        Candidate(ACTOR, Layout(4, 2), 1, 1),
    )
    peaks = asked.model().peaks(plan)
    first, last = peaks[0], peaks[7]
    # Two micro-batches in flight on the first rank, one on the last, which alone has logits (and the final norm).
    assert first.terms["activations"] == pytest.approx(2 * last.terms["activations"], rel=0.03)
    assert (first.terms["logits"], last.terms["logits"] > 0) == (0, True)
    assert first.bytes != last.bytes
    assert set(asked.model().estimate(plan).peak_bytes) == set(range(8))
