"""Training and forward time: FLOPs, bytes and bubbles computed by hand on a machine where only one thing takes time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import Calibration, Candidate, Efficiency, Head, Layout, Lengths, Link, ModelSpec, Workload
from nereus.cost import training
from nereus.cost.kernels import Rates
from nereus.cost.prices import CallPrices
from nereus.cost.rows import Rows
from nereus.cost.site import Site
from tests.cost.jobs import ACTOR, SMALL, TINY

CLASSES = ("forward", "backward", "optimizer", "tp", "cp", "ep", "pp", "dp", "dispatch")
PERFECT = Calibration({name: Efficiency(1.0, 1, 0.0) for name in CLASSES})
ENDLESS = 1e30
FREE = Link(ENDLESS, 0.0)
TOKENS = 16

EXPERTS = replace(TINY, experts=8, experts_per_token=2, expert_hidden=24, shared_experts=1, dense_layers=1)
LATENT = replace(TINY, kv_heads=4, query_rank=12, kv_rank=20, rope_head_dim=6, value_head_dim=10)


def site(
    flops: float = ENDLESS, memory: float = ENDLESS, launch_s: float = 0.0, intra: Link = FREE, inter: Link = FREE,
    **constants: float,
) -> Site:  # fmt: skip
    """Free but for what is given; dispatching is free too. `a__b` stands for the constant `a.b`."""
    named = {"dispatch_s": 0.0} | {name.replace("__", "."): value for name, value in constants.items()}
    return Site(Rates(flops, memory, launch_s, tuple(named.items())), intra, inter, PERFECT)


def work(sequences: int, tokens: float = TOKENS, mini_batch: int = 0, epochs: int = 1) -> Workload:
    """Responses of one length to empty prompts."""
    lengths = Lengths.constant(tokens)
    return Workload(sequences, 1, Lengths.constant(0), lengths, mini_batch or sequences, int(tokens), epochs)


def rows(spec: ModelSpec = TINY, tp: int = 1, pp: int = 1, dp: int = 1, node: int = 64, **rest: object) -> Rows:
    return Rows.of([Candidate(ACTOR, Layout(tp, pp), dp, **rest)], spec.layers, node)  # type: ignore[arg-type]


def ideal(price: CallPrices, name: str) -> float:
    return float(price.ideal.get(name, np.zeros(1))[0])


# TINY: 2 layers, hidden 32, 4 heads of 8, 2 KV heads, feed-forward 64, vocabulary 96.
ATTENTION_PROJECTIONS = 2 * 32 * (32 + 2 * 16) + 2 * 32 * 32
ATTENTION = 4 * 32 * TOKENS / 2
"""A token against the half of the others that comes before it."""
LAYER = ATTENTION_PROJECTIONS + 3 * 2 * 32 * 64
HEAD = 2 * 32 * 96


def test_flops_of_a_forward_pass_by_hand() -> None:
    price = training.forward(TINY, rows(), work(4), site(flops=1e12))
    assert price.seconds[0] == pytest.approx(4 * TOKENS * (2 * (LAYER + ATTENTION) + HEAD) / 1e12)
    ungated = training.forward(replace(TINY, gated=False), rows(), work(4), site(flops=1e12))
    assert price.seconds[0] - ungated.seconds[0] == pytest.approx(4 * TOKENS * 2 * 2 * 32 * 64 / 1e12)
    scalar = training.forward(replace(TINY, head=Head.SCALAR), rows(), work(4), site(flops=1e12))
    assert price.seconds[0] - scalar.seconds[0] == pytest.approx(4 * TOKENS * 2 * 32 * 95 / 1e12)


@pytest.mark.parametrize(
    ("recompute", "again"), [("none", 0.0), ("selective", ATTENTION), ("full", LAYER + ATTENTION)]
)  # fmt: skip
def test_flops_of_an_update_by_hand(recompute: str, again: float) -> None:
    price = training.update(TINY, rows(recompute=recompute), work(4, epochs=3), site(flops=1e12))
    backward = 2 * (2 * LAYER + 2.5 * ATTENTION + again) + 2 * HEAD
    assert ideal(price, "backward") == pytest.approx(3 * 4 * TOKENS * backward / 1e12)
    assert ideal(price, "forward") == pytest.approx(3 * 4 * TOKENS * (2 * (LAYER + ATTENTION) + HEAD) / 1e12)


def test_only_chosen_experts_compute() -> None:
    """One dense layer, one with a router over 8, two chosen experts and a shared one, each 24 wide."""
    price = training.forward(EXPERTS, rows(EXPERTS), work(64), site(flops=1e12))
    expert = 3 * 2 * 32 * 24
    routed = ATTENTION_PROJECTIONS + 2 * 32 * 8 + 3 * expert
    by_hand = 64 * TOKENS * (LAYER + routed + 2 * ATTENTION + HEAD) / 1e12
    assert price.seconds[0] == pytest.approx(by_hand)
    spread = training.forward(EXPERTS, rows(EXPERTS, dp=2, ep=2), work(128), site(flops=1e12))
    assert spread.seconds[0] == pytest.approx(by_hand)


def test_latent_attention_by_hand() -> None:
    """Query 32 → 12 → 4 heads of 8 + 6; keys and values 32 → 20 + 6, 20 → 4 heads of 8 + 10; output 40 → 32."""
    price = training.forward(LATENT, rows(LATENT), work(4), site(flops=1e12))
    projections = 2 * (32 * (12 + 26) + 12 * 4 * 14 + 20 * 4 * 18 + 40 * 32)
    attention = (2 * 4 * 14 + 2 * 4 * 10) * TOKENS / 2
    layer = projections + attention + 3 * 2 * 32 * 64
    assert price.seconds[0] == pytest.approx(4 * TOKENS * (2 * layer + HEAD) / 1e12)


def test_layers_with_a_window_attend_to_fewer_tokens() -> None:
    """Of 16 tokens each sees at most 4: 4 × 16 - 8 pairs instead of 128, in one of the two layers."""
    plain, windowed = (
        training.forward(spec, rows(), work(4), site(flops=1e12))
        for spec in (TINY, replace(TINY, window=4, full_every=2))
    )
    assert plain.seconds[0] - windowed.seconds[0] == pytest.approx(4 * TOKENS * ATTENTION * (1 - 56 / 128) / 1e12)


def test_tensor_parallel_ranks_compute_a_share_and_reduce_hidden_states() -> None:
    slow = site(flops=1e12, intra=Link(1e9, 0.0))
    whole, half = (training.update(TINY, rows(tp=tp), work(4), slow) for tp in (1, 2))
    for name in ("forward", "backward"):
        assert ideal(half, name) == pytest.approx(ideal(whole, name) / 2)
    # Two reductions a layer forward and two backward, one behind the embedding; three of a value a token in the loss.
    state, value = 4 * TOKENS * 32 * 4, 4 * TOKENS * 4
    assert ideal(half, "tp") == pytest.approx(2 * 1 / 2 * ((2 * 4 + 1) * state + 3 * value) / 1e9)
    repeated = training.update(TINY, rows(tp=2, recompute="full"), work(4), slow)
    assert ideal(repeated, "tp") - ideal(half, "tp") == pytest.approx(2 * 2 * state / 1e9)


def test_sequence_parallelism_moves_as_much_and_norms_a_share() -> None:
    slow = site(memory=1e9, intra=Link(1e9, 0.0))
    plain, cut = (training.forward(TINY, rows(tp=2, sequence_parallel=cut), work(4), slow) for cut in (False, True))
    assert ideal(cut, "tp") == pytest.approx(ideal(plain, "tp"))
    assert ideal(cut, "forward") < ideal(plain, "forward")


@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_the_bubble_of_1f1b_is_ranks_less_one_over_micro_batches(micro_batches: int) -> None:
    spec = replace(SMALL, head=Head.SCALAR)
    price = training.update(spec, rows(spec, pp=4), work(micro_batches), site(flops=1e12))
    busy = ideal(price, "forward") + ideal(price, "backward")
    assert ideal(price, "pp") / busy == pytest.approx(3 / micro_batches, rel=1e-3)
    interleaved = training.update(spec, rows(spec, pp=4, vpp=2), work(micro_batches), site(flops=1e12))
    assert ideal(interleaved, "pp") == pytest.approx(ideal(price, "pp") / 2)


def test_unequal_pp_ranks_wait_for_the_fullest() -> None:
    """Five layers as 2, 2, 1; ten micro-batches on the fullest, one on each of the others."""
    spec = replace(SMALL, layers=5, head=Head.SCALAR)
    price = training.forward(spec, rows(spec, pp=3), work(10), site(flops=1e12))
    layer = training.forward(replace(spec, layers=1), rows(replace(spec, layers=1)), work(1), site(flops=1e12))
    assert price.seconds[0] == pytest.approx((10 * 2 + 2 + 1) * layer.seconds[0], rel=1e-3)


def test_pipeline_neighbours_exchange_hidden_states() -> None:
    slow = site(intra=Link(1e9, 0.0))
    state = TOKENS * 32 * 4
    price = training.update(TINY, rows(pp=2), work(6), slow)
    # Six micro-batches forward and their gradients back, and one more of the other rank.
    assert ideal(price, "pp") == pytest.approx((6 + 1) * 2 * state / 1e9)
    shared = training.update(TINY, rows(pp=2, tp=2), work(6), site(inter=Link(1e9, 0.0), pp__scatter=1.0))
    assert ideal(shared, "pp") < 1e-20
    across = training.update(TINY, rows(pp=2, tp=2, node=2), work(6), site(inter=Link(1e9, 0.0), pp__scatter=1.0))
    assert ideal(across, "pp") == pytest.approx((6 + 1) * 2 * state / 2 / 1e9)


PARAMETERS = 2 * (32 * (32 + 32 + 32) + 3 * 32 * 64 + 2 * 32) + 2 * 96 * 32 + 32


@pytest.mark.parametrize(("zero", "volume"), [(0, 2.0), (1, 2.0), (2, 2.0), (3, 3 * 5.0)])
def test_bytes_between_replicas(zero: int, volume: float) -> None:
    """Gradients and weights are fp32 here. ZeRO-3 gathers twice and scatters once for each of five micro-batches."""
    slow = site(intra=Link(1e9, 0.0), dp__overlap=0.0)
    price = training.update(TINY, rows(dp=4, zero=zero), work(20), slow)
    assert ideal(price, "dp") == pytest.approx(volume * 3 / 4 * 4 * PARAMETERS / 1e9)
    alone = training.update(TINY, rows(dp=1, zero=zero), work(20), slow)
    assert ideal(alone, "dp") == 0.0


def test_sharded_reductions_hide_behind_the_passes() -> None:
    slow = {"flops": 1e9, "intra": Link(1e9, 0.0)}
    shown = training.update(TINY, rows(dp=4, zero=3), work(8), site(**slow, dp__overlap=0.0))  # type: ignore[arg-type]
    hidden = training.update(TINY, rows(dp=4, zero=3), work(8), site(**slow, dp__overlap=1.0))  # type: ignore[arg-type]
    assert ideal(hidden, "dp") < ideal(shown, "dp")


def test_replicas_on_a_node_share_its_ports() -> None:
    """Eight nodes of one replica, or two of four: there half of the sum comes from the other node, by four ports."""
    slow = site(inter=Link(1e9, 0.0))
    spread, packed = (training.update(TINY, rows(dp=8, node=node), work(8), slow) for node in (1, 4))
    assert ideal(spread, "dp") == pytest.approx(2 * 7 / 8 * 4 * PARAMETERS / 1e9)
    assert ideal(packed, "dp") == pytest.approx(2 * 1 / 2 * 4 * PARAMETERS / 4 / 1e9)


def test_the_optimizer_moves_its_state() -> None:
    """Four fp32 values read and three written, and the weight; a quarter of them where it is cut between replicas."""
    whole, cut = (training.update(TINY, rows(dp=4, zero=zero), work(4), site(memory=1e9)) for zero in (0, 1))
    assert ideal(whole, "optimizer") == pytest.approx(8 * 4 * PARAMETERS / 1e9)
    assert ideal(cut, "optimizer") == pytest.approx(ideal(whole, "optimizer") / 4)


def test_a_host_that_launches_slowly_is_the_floor() -> None:
    price = training.update(TINY, rows(), work(6), site(launch_s=1.0))
    layers, ends = 2 * 34, 2 * 16
    assert ideal(price, "forward") == pytest.approx(6 * (layers + ends))
    assert ideal(price, "backward") == pytest.approx(6 * 2 * (layers + 16))


def test_scores_that_are_written_and_an_unfused_softmax() -> None:
    """Every score read or written three times; 3 x 4 pairs of sequence and head are no multiple of 8, 2 x 4 are."""
    scores = 2 * 4 * TOKENS**2 * 4
    plain = training.forward(TINY, rows(micro_batch=2), work(2), site(memory=1e9))
    written = training.forward(TINY, rows(micro_batch=2), work(2), site(memory=1e9, attention__scores=3.0))
    assert written.seconds[0] - plain.seconds[0] == pytest.approx(2 * 3 * scores / 1e9)
    unfused = site(launch_s=1.0, attention__multiple=8.0, attention__unfused=5.0)
    fits, odd = (training.forward(TINY, rows(micro_batch=size), work(size), unfused) for size in (2, 3))
    assert odd.seconds[0] - fits.seconds[0] == pytest.approx(2 * 5)


def test_context_parallel_ranks_share_the_tokens() -> None:
    whole, half = (training.forward(TINY, rows(cp=cp), work(4), site(flops=1e12)) for cp in (1, 2))
    assert half.seconds[0] == pytest.approx(whole.seconds[0] / 2)
    slow = training.forward(TINY, rows(cp=2), work(4), site(intra=Link(1e9, 0.0)))
    # Keys and values of two heads of 8 for half of the tokens, in both layers.
    assert ideal(slow, "cp") == pytest.approx(2 * 4 * TOKENS / 2 * 2 * 16 * 4 / 1e9)


def test_any_number_of_replicas_waits_for_the_largest_share() -> None:
    fast = site(flops=1e12)
    three = training.update(TINY, rows(dp=3, micro_batch=2), work(8), fast)
    assert three.seconds[0] == pytest.approx(training.update(TINY, rows(micro_batch=2), work(3), fast).seconds[0])


def test_mini_batches_and_epochs_repeat_an_update() -> None:
    fast = site(flops=1e12, memory=1e12, launch_s=1e-6)
    once = training.update(TINY, rows(), work(4), fast)
    six = training.update(TINY, rows(), work(12, mini_batch=4, epochs=2), fast)
    assert six.seconds[0] == pytest.approx(6 * once.seconds[0])


def test_packing_saves_the_padding_and_nothing_else() -> None:
    fast = site(flops=1e12)
    equal = work(8)
    padded, packed = (
        training.forward(TINY, rows(micro_batch=4), replace(equal, packed=packed), fast) for packed in (False, True)
    )
    assert packed.seconds[0] == pytest.approx(padded.seconds[0])
    uneven = replace(equal, response=Lengths(40, 100, 128), max_response_tokens=128)
    padded, packed = (
        training.forward(TINY, rows(micro_batch=4), replace(uneven, packed=packed), fast) for packed in (False, True)
    )
    assert packed.seconds[0] < padded.seconds[0]


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    tp, pp, dp, micro_batch = (draw(st.sampled_from(each)) for each in ([1, 2, 4], [1, 2, 3], [1, 2, 3, 5], [1, 2, 3]))
    recompute, zero = draw(st.sampled_from(["none", "selective", "full"])), draw(st.sampled_from([0, 1, 3]))
    cp, ep, cut = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.booleans())
    return Candidate(
        ACTOR, Layout(tp, pp), dp, micro_batch, recompute, zero=zero, cp=cp, ep=ep, sequence_parallel=cut
    )  # fmt: skip


REAL = site(1e12, 1e11, 1e-6, Link(1e10, 1e-6), Link(1e9, 1e-5), launch__ahead=1.0, launch__power=4.0)
UNEVEN = Workload(13, 2, Lengths(10, 18, 20), Lengths(40, 100, 128), 26, 128)


@settings(max_examples=25, deadline=None)
@given(st.lists(candidates(), min_size=2, max_size=12), st.sampled_from([SMALL, EXPERTS, LATENT]))
def test_a_row_costs_among_others_what_it_costs_alone(chosen: list[Candidate], spec: ModelSpec) -> None:
    for price in (training.update, training.forward):
        every = price(spec, Rows.of(chosen, spec.layers, 4), UNEVEN, REAL)
        alone = [price(spec, Rows.of([each], spec.layers, 4), UNEVEN, REAL).seconds[0] for each in chosen]
        np.testing.assert_allclose(every.seconds, alone, rtol=1e-12)
        np.testing.assert_allclose(REAL.weigh(every.ideal), every.seconds, rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(candidates(), st.sampled_from([SMALL, EXPERTS, LATENT]), st.floats(1.0, 3.0))
def test_more_work_or_a_slower_machine_never_takes_less_time(
    candidate: Candidate, spec: ModelSpec, factor: float
) -> None:
    def seconds(spec: ModelSpec, workload: Workload, where: Site) -> float:
        return float(training.update(spec, Rows.of([candidate], spec.layers, 4), workload, where).seconds[0])

    # What is hidden behind the last micro-batch counts as behind a full one: a little too much.
    base = seconds(spec, UNEVEN, REAL) * (1 - 1e-2)
    longer = Lengths(40 * factor, 100 * factor, 128 * factor)
    assert seconds(spec, replace(UNEVEN, response=longer), REAL) >= base
    assert seconds(replace(spec, layers=spec.layers + 3), UNEVEN, REAL) >= base
    assert seconds(replace(spec, ffn_hidden=int(spec.ffn_hidden * factor)), UNEVEN, REAL) >= base
    slower = replace(REAL, rates=replace(REAL.rates, flops_per_s=1e12 / factor))
    assert seconds(spec, UNEVEN, slower) >= base
    thin = replace(REAL, intra=Link(1e10 / factor, 1e-6), inter=Link(1e9 / factor, 1e-5))
    assert seconds(spec, UNEVEN, thin) >= base
