"""Bytes per device: per pp rank, per recompute mode, with idle co-residents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.clusters.named import machine
from nereus.core import (
    Calibration,
    Candidate,
    DeviceKind,
    Head,
    Layout,
    Lengths,
    Link,
    ModelSpec,
    SettingsError,
    Work,
    Workload,
    expand,
)
from nereus.cost.cache import kv_token_bytes
from nereus.cost.decoding import Engine
from nereus.cost.held import Held
from nereus.cost.kernels import Rates
from nereus.cost.memory import Memory, runtime_bytes, sequence_kv_bytes
from nereus.cost.ranks import Ranks
from nereus.cost.rows import Rows
from nereus.cost.site import Site
from nereus.cost.state import family_of, schema
from nereus.cost.step import StepModel
from tests.cost.jobs import ACTOR, CRITIC, GENERATION, REFERENCE, SMALL, WORKLOAD, cluster, colocated, grpo, ppo

PLAIN = DeviceKind("plain", 80 * 10**9, {"bf16": 1e14}, 1e12)
LLAMA_8B = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256, dtype="bf16")
MIXTRAL = ModelSpec(
    "mixtral", 4, 64, 8, 4, 8, 128, 320, experts=8, experts_per_token=2, expert_hidden=96, dtype="bf16"
)  # fmt: skip


def memory(
    spec: ModelSpec = SMALL,
    trained: bool = True,
    workload: Workload = WORKLOAD,
    constants: Mapping[str, float] | None = None,
) -> Memory:
    return Memory(spec, trained, workload, replace(PLAIN, constants=constants or {}))


def terms(of: Memory, candidate: Candidate, work: Work = Work.UPDATE) -> list[dict[str, float]]:
    """What a call adds, by pp rank and term."""
    layers, pp = of.spec.layers, candidate.layout.pp
    found = of.transient(Rows.of([candidate], layers, 8), Ranks.every(candidate.layout, layers), work)
    return [{name: float(np.broadcast_to(size, pp)[rank]) for name, size in found.items()} for rank in range(pp)]


def stored(of: Memory, candidate: Candidate) -> list[float]:
    """Bytes between calls, by pp rank."""
    layers = of.spec.layers
    return list(map(float, _sum(of.resident(Rows.of([candidate], layers, 8), Ranks.every(candidate.layout, layers)))))


def _sum(found: Mapping[str, Any]) -> Any:
    return sum(found.values())


def parameters(spec: ModelSpec) -> int:
    """Elements of an untied dense model, written down from its sizes."""
    query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = spec.hidden * (query + 2 * keys) + query * spec.hidden + 3 * spec.hidden * spec.ffn_hidden + 2 * spec.hidden
    return spec.layers * layer + 2 * spec.vocab * spec.hidden + spec.hidden


def test_llama_3_1_8b_has_the_published_size() -> None:
    whole = Candidate(ACTOR, Layout(), 1)
    assert parameters(LLAMA_8B) == 8_030_261_248
    assert stored(memory(LLAMA_8B, trained=False), whole) == [2 * parameters(LLAMA_8B)]
    # bf16 parameter, fp32 master and two moments; with its fp32 gradient 18 bytes during an update
    assert stored(memory(LLAMA_8B), whole) == [14 * parameters(LLAMA_8B)]
    assert terms(memory(LLAMA_8B), whole)[0]["gradients"] == 4 * parameters(LLAMA_8B)


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 3), Layout(4, 2), Layout(2, 3)])
def test_stored_bytes_are_those_of_the_schema(layout: Layout) -> None:
    job = grpo(SMALL)
    for model_stage in job.model_stages:
        trained = job.updated(model_stage)
        (unit,) = expand(colocated(job, tp=layout.tp, pp=layout.pp)).of(model_stage)
        known = schema(job.spec(model_stage), trained)
        expected = [known.stored_bytes(unit, unit.devices[rank * layout.tp]) for rank in range(layout.pp)]
        assert stored(memory(SMALL, trained), Candidate(model_stage, layout, 1)) == expected


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    head = draw(st.sampled_from(list(Head)))
    return ModelSpec(
        family=draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        layers=draw(st.integers(1, 9)),
        hidden=draw(st.sampled_from([32, 48])),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        kv_heads=kv_heads,
        head_dim=8,
        ffn_hidden=draw(st.integers(40, 100)),
        vocab=draw(st.integers(50, 120)),
        tied_embeddings=head is Head.LM and draw(st.booleans()),
        head=head,
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


@given(models(), st.data())
@settings(max_examples=60, deadline=None)
def test_closed_forms_are_the_sums_over_all_tensors(spec: ModelSpec, data: st.DataObject) -> None:
    """For every pp rank, with padding, replicated KV heads, uneven shares. No tp rank holds more than the first."""
    tp = data.draw(st.sampled_from([tp for tp in family_of(spec).legal_tp(spec) if tp <= 8]))
    layout = Layout(tp, data.draw(st.integers(1, spec.layers)))
    rows, ranks = Rows.of([Candidate(ACTOR, layout, 1)], spec.layers, 8), Ranks.every(layout, spec.layers)
    held = Held.of(spec, rows, ranks).elements(np.array([False]))
    for pp_rank in range(layout.pp):
        by_tp_rank = [
            sum(
                math.prod(tensor.local_shape(tp, tp_rank))
                for tensor in family_of(spec).tensors(spec)
                if layout.holds(tensor, pp_rank, spec.layers)
            )
            for tp_rank in range(tp)
        ]
        assert held[pp_rank] == by_tp_rank[0] == max(by_tp_rank)


def test_first_and_last_pp_rank_differ() -> None:
    found = terms(memory(), Candidate(ACTOR, Layout(1, 4), 1, micro_batch=2))
    assert found[0]["logits"] == 0 < found[3]["logits"]
    # 1F1B: the first rank holds most micro-batches in flight, the last one; a mini-batch of 4 has two of them
    assert found[0]["activations"] == found[1]["activations"]
    assert found[2]["activations"] == found[0]["activations"]
    assert found[3]["activations"] < found[2]["activations"]


def test_micro_batches_in_flight_are_limited_by_the_rank_and_by_their_number() -> None:
    workload = replace(WORKLOAD, prompts=16, mini_batch=16)
    found = terms(memory(workload=workload), Candidate(ACTOR, Layout(1, 4), 1, micro_batch=1))
    assert found[0]["activations"] / found[1]["activations"] == pytest.approx(4 / 3)
    assert found[1]["activations"] / found[2]["activations"] == pytest.approx(3 / 2)


def test_interleaved_pipelines_hold_more_micro_batches() -> None:
    """Korthikanti et al. 2022: 1 + (p - 1) / (p m) times the activations of p micro-batches on the first rank."""
    workload = replace(WORKLOAD, prompts=32, mini_batch=64)
    plain, interleaved = (
        terms(memory(workload=workload), Candidate(ACTOR, Layout(1, 4), 1, micro_batch=1, vpp=vpp))[0]["activations"]
        for vpp in (1, 2)
    )
    assert interleaved / plain == pytest.approx(1 + (4 - 1) / (4 * 2))


def test_recompute_changes_the_estimate_a_lot() -> None:
    """32k tokens through 64 layers of hidden 5,120 at TP 2: hundreds of gigabytes or a few dozen."""
    spec = ModelSpec("llama", 64, 5120, 40, 8, 128, 27648, 152064, dtype="bf16")
    workload = Workload(1, 1, Lengths.constant(512), Lengths.constant(32_198), 1, 32_768)

    def activations(recompute: str) -> float:
        (found,) = terms(memory(spec, workload=workload), Candidate(ACTOR, Layout(2, 1), 1, recompute=recompute))
        return found["activations"] + found["recomputed layer"]

    assert activations("none") > 107e9
    assert activations("selective") > 107e9
    assert activations("full") < 0.2 * activations("selective")


def test_activations_of_one_layer_counted_by_hand() -> None:
    """fp32, one layer: 6 hidden + 2 query + 2 keys + 4 ffn, and the final norm's 3 hidden, for every token."""
    spec = ModelSpec("llama", 1, 128, 8, 4, 32, 352, 96)
    workload = Workload(4, 1, Lengths.constant(16), Lengths.constant(48), 4, 48)
    (found,) = terms(memory(spec, workload=workload), Candidate(ACTOR, Layout(), 1, micro_batch=4))
    a_token = 6 * 128 + 2 * 256 + 2 * 128 + 4 * 352 + 3 * 128
    assert found["activations"] == 4 * 64 * a_token * 4


def test_a_gpt_layer_is_counted_as_in_the_literature() -> None:
    """34 bytes a token and hidden unit in fp16 with dropout (Korthikanti et al. 2022), whose two masks take 2."""
    spec = ModelSpec("gpt2", 2, 128, 4, 4, 32, 512, 96, dtype="bf16", gated=False, tied_embeddings=True)
    workload = Workload(1, 1, Lengths.constant(0), Lengths.constant(64), 1, 64)
    fused = memory(spec, workload=workload, constants={"memory.norm_copies": 0.5})
    first, last = terms(fused, Candidate(ACTOR, Layout(1, 2), 1))
    assert first["activations"] == (34 - 2) * 64 * 128
    assert last["activations"] - first["activations"] == 4 * 64 * 128


def test_sequence_and_context_parallelism_cut_what_they_say() -> None:
    plain = Candidate(ACTOR, Layout(4, 1), 1)
    whole, cut, ring = (
        terms(memory(LLAMA_8B), each)[0]
        for each in (plain, replace(plain, sequence_parallel=True), replace(plain, cp=2))
    )
    tokens, norms = 32, 2 * 32 + 1
    saved = tokens * 2 * norms * 5 * 4096 * (1 - 1 / 4)
    assert whole["activations"] - cut["activations"] == pytest.approx(saved)
    for name in ("activations", "logits", "working set"):
        assert ring[name] == pytest.approx(whole[name] / 2)


def test_zero_shards_what_its_level_says() -> None:
    """18 bytes a parameter; over 8 replicas 6 + 12/8, 2 + 16/8 and 18/8 (Rajbhandari et al. 2020)."""
    spec, expected = replace(LLAMA_8B, layers=2), {0: 18, 1: 6 + 12 / 8, 2: 2 + 16 / 8, 3: 18 / 8}
    for zero, bytes_ in expected.items():
        for dp, cp in ((8, 1), (4, 2)):
            candidate = Candidate(ACTOR, Layout(), dp, zero=zero, cp=cp)
            held = stored(memory(spec), candidate)[0] + terms(memory(spec), candidate)[0]["gradients"]
            assert held == pytest.approx(bytes_ * parameters(spec))


def test_sharded_parameters_are_gathered_layer_by_layer() -> None:
    (found,) = terms(memory(LLAMA_8B), Candidate(ACTOR, Layout(), 8, zero=3))
    layer = (parameters(LLAMA_8B) - 2 * LLAMA_8B.vocab * 4096 - 4096) // 32
    # Two layers' parameters, one layer's gradients, in bf16
    assert found["gathered layers"] == 3 * 2 * layer


def test_experts_are_cut_by_ep_and_sharded_over_the_rest() -> None:
    """8 experts of 3 x 64 x 96 in each of 4 layers; 16 devices as dp 4 x tp 4."""
    expert = 3 * 64 * 96

    def elements(tp: int, ep: int) -> float:
        layout = Layout(tp, 1)
        rows = Rows.of([Candidate(ACTOR, layout, 4, ep=ep)], 4, 8)
        return float(Held.of(MIXTRAL, rows, Ranks.every(layout, 4)).experts[0])

    assert elements(tp=1, ep=1) == 4 * 8 * expert
    assert elements(tp=4, ep=1) == 4 * 8 * expert / 4
    assert elements(tp=1, ep=4) == 4 * 2 * expert
    assert elements(tp=4, ep=8) == 4 * 1 * expert
    zero1 = Candidate(ACTOR, Layout(4, 1), 4, ep=8, zero=1)
    held = Held.of(MIXTRAL, Rows.of([zero1], 4, 8), Ranks.every(Layout(4, 1), 4))
    assert held.expert_replicas.tolist() == [2]


def test_tokens_sent_to_experts_are_counted() -> None:
    """Each of 2 chosen experts gets a copy of the token, returns one, and keeps 4 widths for its backward."""
    workload = Workload(1, 1, Lengths.constant(0), Lengths.constant(64), 1, 64)
    with_experts, dense = (
        terms(memory(spec, workload=workload), Candidate(ACTOR, Layout(), 1))[0]["activations"]
        for spec in (MIXTRAL, replace(MIXTRAL, dense_layers=4))
    )
    assert with_experts - dense == 4 * 64 * 2 * (2 * (2 * 64 + 4 * 96) - 4 * 128)


def test_packed_micro_batches_hold_about_the_mean_but_at_least_the_longest() -> None:
    tail = Lengths(100, 300, 1000)
    padded = Workload(64, 1, Lengths.constant(0), tail, 64, 1000)

    def activations(sequences: int, workload: Workload) -> float:
        (found,) = terms(memory(workload=workload), Candidate(ACTOR, Layout(), 1, micro_batch=sequences))
        return found["activations"]

    packed = replace(padded, packed=True)
    assert activations(1, packed) == activations(1, padded)
    assert 0.1 * activations(64, padded) < activations(64, packed) < 0.2 * activations(64, padded)


@pytest.mark.parametrize(
    ("loss", "update_bytes", "forward_bytes"),
    [
        ("eager", 12, 8),  # three and two copies in fp32
        ("vocab_parallel", 6, 12),  # one in fp32 and its cast; the logits, their copy and its exponentials
        ("in_place", 2, 6),  # logits in bf16; with probabilities and their product
        ("in_place_chunked", 2, 4),
        ("fused", 0, 0),
    ],
)
def test_logits_have_as_many_copies_as_the_loss_makes(loss: str, update_bytes: int, forward_bytes: int) -> None:
    work = Workload(4, 1, Lengths.constant(10), Lengths.constant(90), 4, 90, loss=loss)
    candidate = Candidate(ACTOR, Layout(), 1, micro_batch=2)
    of = memory(replace(SMALL, dtype="bf16"), workload=work)
    elements = 2 * 90 * SMALL.vocab
    assert terms(of, candidate)[0]["logits"] == elements * update_bytes
    assert terms(of, candidate, Work.FORWARD)[0]["logits"] == elements * forward_bytes


def test_an_unknown_loss_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(SettingsError, match="loss 'lazy', valid: eager, vocab_parallel, in_place"):
        replace(WORKLOAD, loss="lazy")


def test_gradients_exist_during_an_update_only() -> None:
    candidate = Candidate(ACTOR, Layout(), 1)
    assert terms(memory(), candidate)[0]["gradients"] > 0
    assert "gradients" not in terms(memory(), candidate, Work.FORWARD)[0]


def test_the_kv_cache_grows_in_blocks_to_the_longest_sequence() -> None:
    workload = Workload(4, 1, Lengths.constant(10), Lengths(5, 7, 9), 4, 32)
    candidate = Candidate(GENERATION, Layout(2, 1), 1, micro_batch=4)
    (found,) = terms(memory(workload=workload), candidate, Work.GENERATE)
    # 19 tokens need two blocks of 16; 2 of 4 KV heads of 16, keys and values, 8 layers, fp32
    assert found["kv cache"] == 4 * 32 * 2 * 2 * 16 * 8 * 4


def test_finished_sequences_leave_the_kv_cache() -> None:
    tail = Lengths.measured([16] * 31 + [512])
    workload = Workload(32, 1, Lengths.constant(16), tail, 32, 512)
    candidate = Candidate(GENERATION, Layout(), 1, micro_batch=32)
    unknown = replace(workload, response=replace(tail, quantiles=()))
    measured, certain = (
        terms(memory(workload=each), candidate, Work.GENERATE)[0]["kv cache"] for each in (workload, unknown)
    )
    assert measured < 0.3 * certain


def test_a_kv_budget_limits_the_cache_and_is_reserved_whole() -> None:
    one = sequence_kv_bytes(SMALL, Layout(), WORKLOAD, (PLAIN,))
    free = Candidate(GENERATION, Layout(), 1, micro_batch=8)

    def cache(candidate: Candidate) -> float:
        return terms(memory(), candidate, Work.GENERATE)[0]["kv cache"]

    assert cache(free) == 8 * one
    assert cache(replace(free, micro_batch=2, kv_bytes=2 * one)) == 2 * one
    assert cache(replace(free, micro_batch=2, kv_bytes=20 * one)) == 20 * one


def test_an_engine_with_a_narrower_cache_holds_what_it_reads() -> None:
    """One byte an element instead of four, in memory, in a budget and in what a decode step reads."""
    narrow, free = {"generation.kv_bytes": 1.0}, Candidate(GENERATION, Layout(), 1, micro_batch=8)
    cache = [terms(memory(constants=each), free, Work.GENERATE)[0]["kv cache"] for each in ({}, narrow)]
    kinds = (replace(PLAIN, constants=narrow), PLAIN)
    budgets = [sequence_kv_bytes(SMALL, Layout(), WORKLOAD, kinds[:count]) for count in (2, 1)]
    rates = [Rates(1e14, 1e12, 1e-6, tuple(each.items())) for each in ({}, narrow)]
    link, rows = Link(1e9, 1e-6), Rows.of([free], SMALL.layers, 8)
    read = [Engine(SMALL, rows, Site(each, link, link, Calibration())).token_bytes[0] for each in rates]
    assert cache[0] == 4 * cache[1]
    assert budgets[0] == 4 * budgets[1]
    assert read[0] == 4 * read[1] == kv_token_bytes(SMALL, rows.tp, rows.layers_first, {})[0]


def test_kv_heads_fewer_than_tp_ranks_are_replicated_and_latent_attention_caches_one_vector() -> None:
    """4 KV heads: TP 8 holds one a rank, as TP 4 does. DeepSeek-V3: 512 + 64 elements a token and layer, whole."""
    spec = ModelSpec("qwen3", 4, 64, 32, 4, 8, 64, 96, dtype="bf16")
    by_tp = [int(kv_token_bytes(spec, np.array(tp), np.array(4), {})) for tp in (1, 2, 4, 8)]
    assert by_tp == [4 * 2 * 4 * 8 * 2 // cut for cut in (1, 2, 4, 4)]
    latent = replace(spec, kv_rank=512, rope_head_dim=64, value_head_dim=8)
    assert kv_token_bytes(latent, np.array([1, 8]), np.array(4), {}).tolist() == [4 * 576 * 2] * 2


def test_a_serving_engine_prefills_in_chunks_and_keeps_graphs() -> None:
    workload = Workload(64, 1, Lengths.constant(100), Lengths.constant(10), 64, 10)
    candidate = Candidate(GENERATION, Layout(), 1, micro_batch=64)
    whole, chunked = (
        terms(memory(workload=workload, constants=constants), candidate, Work.GENERATE)[0]
        for constants in ({}, {"prefill.tokens": 640, "graphs.bytes": 1e9})
    )
    assert chunked["prefill"] == whole["prefill"] / 10
    assert chunked["graphs"] == 1e9
    assert "graphs" not in whole


def test_every_kind_of_group_has_a_communicator_and_every_device_a_runtime() -> None:
    of = memory(constants={"communicator.bytes": 1000})
    for candidate, groups in (
        (Candidate(ACTOR, Layout(), 1), 0),
        (Candidate(ACTOR, Layout(2, 1), 1), 1),
        (Candidate(ACTOR, Layout(2, 2), 2), 3),
    ):
        assert stored(of, candidate)[0] - stored(memory(), candidate)[0] == 1000 * groups
    (h100,) = machine("h100x8").kinds.values()
    assert runtime_bytes(h100) == 512 * 2**20 + 96 * 2**20
    assert runtime_bytes(PLAIN) == 0


def test_an_offloaded_model_stage_takes_memory_during_its_own_work_alone() -> None:
    here, away = Candidate(ACTOR, Layout(), 1), Candidate(ACTOR, Layout(), 1, offload=True)
    assert stored(memory(), away) == [0]
    assert terms(memory(), away)[0]["loaded state"] == stored(memory(), here)[0]
    assert "loaded state" not in terms(memory(), here)[0]


degrees = st.sampled_from([1, 2, 4, 8])
candidates = st.builds(
    Candidate,
    model_stage=st.just(ACTOR),
    layout=st.builds(Layout, degrees, st.integers(1, 8)),
    dp=st.integers(1, 8),
    micro_batch=st.integers(1, 12),
    recompute=st.sampled_from(["none", "selective", "full"]),
    zero=st.integers(0, 3),
    cp=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
)
lengths = st.integers(1, 300)
MANY = Workload(16, 4, Lengths.constant(64), Lengths.constant(200), 32, 200)
CUT_BY_TP = ("parameters", "optimizer state", "gradients", "activations", "logits", "kv cache")


def everything(of: Memory, candidate: Candidate) -> dict[str, float]:
    """The largest of each term over pp ranks, resident and of any work."""
    layers = of.spec.layers
    rows, ranks = Rows.of([candidate], layers, 8), Ranks.every(candidate.layout, layers)
    found = [of.resident(rows, ranks), *(of.transient(rows, ranks, work) for work in Work)]
    return {name: float(np.max(size)) for terms_ in found for name, size in terms_.items()}


def peak(of: Memory, candidate: Candidate, work: Work) -> float:
    return max(sum(each.values()) for each in terms(of, candidate, work))


@given(candidates, st.sampled_from([SMALL, replace(SMALL, tied_embeddings=True), MIXTRAL]))
@settings(max_examples=150, deadline=None)
def test_more_parallelism_never_takes_more_of_what_it_cuts(candidate: Candidate, spec: ModelSpec) -> None:
    # Buckets so small that the backward pass, not the reduction after it, makes the peak.
    of, layout = memory(spec, workload=MANY, constants={"dp.bucket_bytes": 1}), candidate.layout
    before = everything(of, candidate)
    more_tp = everything(of, replace(candidate, layout=Layout(2 * layout.tp, layout.pp)))
    assert all(more_tp[name] <= before[name] for name in CUT_BY_TP)
    if layout.pp < spec.layers:
        more_pp = everything(of, replace(candidate, layout=Layout(layout.tp, layout.pp + 1)))
        assert all(more_pp[name] <= before[name] for name in ("parameters", "optimizer state", "gradients"))
    if candidate.zero < 3:
        sharded = everything(of, replace(candidate, zero=candidate.zero + 1))
        assert all(sharded[name] <= before[name] for name in ("parameters", "optimizer state", "gradients"))
    full = everything(of, replace(candidate, recompute="full"))
    assert full["activations"] <= before["activations"]
    split = everything(of, replace(candidate, sequence_parallel=True))
    assert split["activations"] <= before["activations"]


@given(candidates, lengths, lengths)
@settings(max_examples=100, deadline=None)
def test_longer_sequences_and_larger_micro_batches_never_take_less(candidate: Candidate, one: int, other: int) -> None:
    short, long = (
        memory(workload=replace(MANY, response=Lengths.constant(length), max_response_tokens=300))
        for length in sorted((one, other))
    )
    larger = replace(candidate, micro_batch=candidate.micro_batch + 1)
    for work in Work:
        assert peak(short, candidate, work) <= peak(long, candidate, work)
        assert peak(short, candidate, work) <= peak(short, larger, work)


@given(candidates, st.sampled_from([SMALL, MIXTRAL, replace(MIXTRAL, dense_layers=1)]))
@settings(max_examples=100, deadline=None)
def test_the_three_ends_of_a_pipeline_bound_every_rank(candidate: Candidate, spec: ModelSpec) -> None:
    """What the search adds up is never less than the true peak, and the same where no middle rank is guessed."""
    if candidate.layout.pp > spec.layers:
        return
    of = memory(spec, workload=MANY)
    rows = Rows.of([candidate], spec.layers, 8)
    for work in Work:
        bound = max(float(_sum(of.transient(rows, ranks, work))[0]) for ranks in Ranks.ends(rows, spec.layers))
        true = peak(of, candidate, work)
        assert bound >= true
        if candidate.layout.pp < 4:
            assert bound == true


def test_many_rows_are_priced_as_each_alone() -> None:
    asked = [
        Candidate(ACTOR, Layout(tp, pp), dp, mb, recompute)
        for tp in (1, 2, 4)
        for pp in (1, 2, 3)
        for dp, mb, recompute in ((1, 2, "none"), (3, 1, "full"))
    ]
    of = memory()

    def fullest(rows: Rows) -> Any:
        ends = Ranks.ends(rows, SMALL.layers)
        return np.maximum.reduce([_sum(of.transient(rows, ranks, Work.UPDATE)) for ranks in ends])

    together = fullest(Rows.of(asked, SMALL.layers, 8))
    assert together.tolist() == [fullest(Rows.of([each], SMALL.layers, 8))[0] for each in asked]


def test_idle_model_stages_count_on_every_device() -> None:
    """The engine that wakes on a device finds the optimizer state of training still there."""
    job = ppo(SMALL)
    plan = colocated(job, dp=2, micro_batch=1)
    peak_bytes = StepModel(job, WORKLOAD, cluster(2)).estimate(plan).peak_bytes[0]
    total, largest, alone = 0.0, 0.0, 0.0
    for model_stage in job.model_stages:
        of, candidate = memory(job.spec(model_stage), job.updated(model_stage)), plan.of(model_stage).candidate
        total += stored(of, candidate)[0]
        alone = stored(of, candidate)[0] if model_stage == GENERATION else alone
        for call in job.calls_of(model_stage):
            largest = max(largest, sum(terms(of, candidate, call.work)[0].values()))
    assert peak_bytes == total + largest
    assert total > 6 * alone


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
