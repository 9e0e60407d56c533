"""Experts and low precision in one layer, by hand: what travels, what is read, what stays in bf16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nereus.core import Calibration, Candidate, DeviceKind, Layout, Link, ModelSpec
from nereus.cost.decoding import Engine
from nereus.cost.kernels import Rates, attention_s, gemm_s
from nereus.cost.layer import Block, MicroBatch
from nereus.cost.ranks import Ranks
from nereus.cost.replicas import Replicas
from nereus.cost.rows import Rows
from nereus.cost.site import Site
from tests.cost.jobs import ACTOR

SPEC = ModelSpec(
    "qwen3_moe", 1, 64, 4, 2, 16, 128, 96, experts=16, experts_per_token=4, expert_hidden=32, dtype="bf16"
)  # fmt: skip
KIND = DeviceKind("gpu", 10**9, {"bf16": 1e12, "fp8": 2e12}, 1e11)
INTRA, INTER = Link(1e10, 0.0), Link(1e9, 0.0)


def block(ep: int, node: int, tokens: int = 32, precision: str = "bf16", experts_share: float = 1.0) -> Block:
    kind = replace(KIND, constants={"gemm.experts_share": experts_share})
    rows = Rows.of([Candidate(ACTOR, Layout(), dp=ep, ep=ep)], 1, node)
    batch = MicroBatch(np.ones(1), np.full(1, float(tokens)), np.full(1, float(tokens)))
    return Block(SPEC, rows, Site(Rates.of(kind, precision), INTRA, INTER, Calibration(), (kind,)), batch)


def test_inside_a_node_a_token_travels_to_each_of_its_experts() -> None:
    assert block(ep=4, node=8).experts_exchange_s() == pytest.approx(32 * 64 * 2 * 4 * (3 / 4) / 1e10)


def test_between_nodes_a_token_travels_once_to_each_other_node_that_has_one_of_its_experts() -> None:
    """Two nodes: a token with one expert leaves its own in half the cases, one with four in 15 of 16."""
    four = block(ep=4, node=2)
    one = replace(four, spec=replace(SPEC, experts_per_token=1))
    assert four.experts_exchange_s() / one.experts_exchange_s() == pytest.approx((15 / 16) / (1 / 2))


def summed_s(spec: ModelSpec, candidate: Candidate, node: int) -> float:
    """Seconds of the gradients' all-reduces of one mini-batch."""
    rows = Rows.of([candidate], spec.layers, node)
    site = Site(Rates.of(KIND, "bf16"), INTRA, INTER, Calibration(), (KIND,))
    passes = {"forward": np.ones(1), "backward": np.ones(1)}
    (whole,) = Ranks.ends(rows, spec.layers)
    return float(Replicas(spec, rows, site, whole).update(passes, np.ones(1, dtype=np.int64))["dp"][0])


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "copies", "on_a_node"),
    [(1, 16, 8, 2, 1), (1, 16, 2, 8, 4), (2, 16, 16, 2, 1), (1, 16, 16, 1, 1), (1, 8, 4, 2, 2)],
)
def test_copies_of_an_expert_are_further_apart_than_copies_of_all_else(
    tp: int, dp: int, ep: int, copies: int, on_a_node: int
) -> None:
    """Nodes of 8. Between nodes, copies sum over as many ports as a node has of them; a node alone uses its link."""
    candidate, width = Candidate(ACTOR, Layout(tp), dp=dp, ep=ep), 8
    wider = replace(SPEC, expert_hidden=SPEC.expert_hidden + width)
    size_bytes = 4 * 3 * SPEC.hidden * width * SPEC.experts / ep
    nodes = copies / on_a_node
    between_s = 2 * (1 - 1 / nodes) * size_bytes / (INTER.bytes_per_s * on_a_node)
    inside_s = 2 * (1 - 1 / copies) * size_bytes / INTRA.bytes_per_s
    expected_s = between_s if tp * dp > 8 else inside_s
    assert summed_s(wider, candidate, 8) - summed_s(SPEC, candidate, 8) == pytest.approx(expected_s, abs=1e-12)


def test_gradients_of_context_parallel_ranks_travel_between_nodes() -> None:
    """One replica of 16 ranks on two nodes: eight ports each carry what two ranks would exchange."""
    spec = replace(SPEC, experts=0, experts_per_token=0, family="llama")
    wider = replace(spec, ffn_hidden=spec.ffn_hidden + 8)
    candidate = Candidate(ACTOR, Layout(), dp=1, cp=16)
    size_bytes = 4 * 3 * spec.hidden * 8
    assert summed_s(wider, candidate, 8) - summed_s(spec, candidate, 8) == pytest.approx(size_bytes / 8e9, abs=1e-12)


def test_few_tokens_read_the_weights_of_the_experts_they_hit() -> None:
    """One token of an idle engine: four choices among 16 experts hit 16 * (1 - (15 / 16)^4) of them."""
    made = block(ep=1, node=8, tokens=1)
    hit = 16 * (1 - (15 / 16) ** 4)
    only_experts = made.matrices_s(True) - replace(made, spec=replace(SPEC, expert_hidden=1)).matrices_s(True)
    per_width = hit * 3 * 64 * 2 / 1e11
    assert only_experts == pytest.approx(31 * per_width, rel=1e-3)


def test_grouped_products_reach_their_own_share() -> None:
    whole, half = block(1, 8, 4096), block(1, 8, 4096, experts_share=0.5)
    pairs = 4096 * 4
    experts_s = gemm_s(whole.site.rates, pairs, 64, 64) + gemm_s(whole.site.rates, pairs, 64, 32)
    assert half.matrices_s(True) - whole.matrices_s(True) == pytest.approx(experts_s, rel=1e-6)


def test_an_engine_pays_for_each_expert_that_a_step_hits() -> None:
    """Two tokens with four choices each among 16 experts hit 16 * (1 - (15 / 16)^8) of them."""
    graphs = {"generation.launches": 0.0}
    constants = {"generation.experts_start_s": 3e-6, "generation.expert_s": 1e-6}
    rows = Rows.of([Candidate(ACTOR, Layout(), dp=1)], 1, 8)

    def routed_s(kind: DeviceKind) -> float:
        site = Site(Rates.of(kind, "bf16"), INTRA, INTER, Calibration(), (kind,))
        return float(Engine(SPEC, rows, site).step(np.full(1, 2.0), np.full(1, 10.0)).routed[0])

    hit = 16 * (1 - (15 / 16) ** 8)
    more_s = routed_s(replace(KIND, constants=graphs | constants)) - routed_s(replace(KIND, constants=graphs))
    assert more_s == pytest.approx(3e-6 + hit * 1e-6, rel=1e-6)


def test_a_step_with_latent_attention_pays_for_its_small_kernels_in_every_layer() -> None:
    latent = replace(SPEC, family="deepseek_v3", kv_rank=32, query_rank=48, rope_head_dim=8, value_head_dim=16)
    rows = Rows.of([Candidate(ACTOR, Layout(), dp=1)], 1, 8)

    def layer_s(spec: ModelSpec, constants: dict[str, float]) -> float:
        kind = replace(KIND, constants={"generation.launches": 0.0} | constants)
        site = Site(Rates.of(kind, "bf16"), INTRA, INTER, Calibration(), (kind,))
        return float(Engine(spec, rows, site).step(np.full(1, 2.0), np.full(1, 10.0)).dense[0])

    more = {"generation.latent_s": 5e-5}
    assert layer_s(latent, more) - layer_s(latent, {}) == pytest.approx(5e-5)
    assert layer_s(SPEC, more) == layer_s(SPEC, {})


def test_only_products_of_layers_run_in_fp8() -> None:
    wide, low = Rates.of(KIND, "bf16"), Rates.of(KIND, "fp8")
    size = np.full(1, 4096.0)
    assert attention_s(low, size, size, size, 128) == attention_s(wide, size, size, size, 128)
    assert gemm_s(low, size, size, size, 1.0) < gemm_s(wide, size, size, size)
    assert gemm_s(low.wide, size, size, size) == gemm_s(wide, size, size, size)


def test_low_precision_reaches_its_own_share_of_its_peak() -> None:
    rates = Rates.of(replace(KIND, constants={"gemm.low_share": 0.8}), "fp8")
    assert (rates.flops_per_s, rates.wide.flops_per_s) == (1.6e12, 1e12)


def test_a_device_without_low_precision_reads_low_weights_and_computes_in_bf16() -> None:
    older = replace(KIND, peak_flops={"bf16": 1e12, "fp32": 1e11})
    rates = Rates.of(older, "fp8")
    assert (rates.flops_per_s, rates.wide.flops_per_s, rates.low_bytes) == (1e12, 1e12, 1.0)
