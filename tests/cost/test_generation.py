"""Generation: prefill, decode while the batch shrinks, KV budgets, experts, latent caches, pp in turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.clusters.named import machine
from nereus.core import Calibration, Candidate, DeviceKind, Layout, Lengths, ModelSpec, Workload
from nereus.cost.decoding import Engine
from nereus.cost.generation import generate
from nereus.cost.kernels import Rates
from nereus.cost.lengths import segments
from nereus.cost.prices import CallPrices
from nereus.cost.rows import Rows
from nereus.cost.site import Site
from nereus.families.models import named
from tests.cost.jobs import GENERATION, SMALL, cluster

LLAMA = named("Llama-3.1-8B")
WORKLOAD = Workload(64, 4, Lengths(500, 900, 1024), Lengths(1000, 3000, 4096), 256, 4096)


def site(kind: DeviceKind | None = None, precision: str = "bf16", constants: Mapping[str, float] | None = None) -> Site:
    pool = machine("h200x8")
    (known,) = pool.kinds.values()
    chosen = kind or replace(known, constants=dict(known.constants) | dict(constants or {}))
    return Site(Rates.of(chosen, precision), pool.links["intra"], pool.links["inter"], Calibration(), (chosen,))


def rows(spec: ModelSpec = LLAMA, node_size: int = 8, **candidate: Any) -> Rows:
    layout = Layout(candidate.pop("tp", 1), candidate.pop("pp", 1))
    return Rows.of([Candidate(GENERATION, layout, candidate.pop("dp", 1), **candidate)], spec.layers, node_size)


def seconds(
    spec: ModelSpec = LLAMA, workload: Workload = WORKLOAD, where: Site | None = None, **candidate: Any
) -> float:
    return float(generate(spec, rows(spec, **candidate), workload, where or site()).seconds[0])


def test_the_batch_shrinks_as_sequences_end() -> None:
    steps, ends, alive = segments(WORKLOAD.response, np.array([256.0, 8.0]))
    assert ends[-1] == pytest.approx([4096, 4096])
    assert alive[0] == pytest.approx([256, 8])
    assert (np.diff(alive, axis=0) <= 0).all()
    # Tokens by the segments are about sequences times the mean length.
    assert (steps * alive).sum(axis=0)[0] == pytest.approx(256 * 1000, rel=0.15)


def test_one_sequence_decodes_one_segment() -> None:
    steps, _, alive = segments(WORKLOAD.response, np.array([1.0]))
    assert steps.sum() == 4096
    assert alive[steps > 0] == pytest.approx([1.0])


def test_a_decode_step_at_small_batch_reads_the_weights_once() -> None:
    where = site()
    parts = Engine(LLAMA, rows(), where).step(np.array([1.0]), np.array([1.0]))
    step_s = 32 * parts.dense[0] + parts.head[0]
    weights_s = 2 * 7.5e9 / where.rates.bytes_per_s
    assert weights_s < step_s < 2 * weights_s


def test_fp8_weights_halve_what_is_read() -> None:
    one = np.array([1.0])
    slow = Engine(LLAMA, rows(), site()).step(one, one).dense[0]
    fast = Engine(LLAMA, rows(), site(precision="fp8")).step(one, one).dense[0]
    assert 0.5 * slow < fast < 0.8 * slow


def test_a_few_tokens_read_few_experts_and_many_read_all() -> None:
    mixture = named("Qwen3-30B-A3B")
    engine = Engine(mixture, rows(mixture), site())

    def expert_s(live: float) -> float:
        parts = engine.step(np.array([live]), np.array([1.0]))
        return float(parts.routed[0])

    # 8 of 128 experts for one token; 32 tokens choose at most 256 and hit about 128 * (1 - (127/128)^256) = 111.
    assert expert_s(32) > 4 * expert_s(1)
    assert expert_s(256) < 2 * expert_s(32)


def test_a_latent_cache_is_read_once_for_all_heads() -> None:
    deepseek = named("DeepSeek-V3")
    engine = Engine(deepseek, rows(deepseek), site())
    assert engine.token_bytes[0] == 61 * (512 + 64) * 2
    grouped = Engine(LLAMA, rows(), site())
    assert grouped.token_bytes[0] == 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("tp", "node", "share"), [(8, 8, 0.25), (4, 64, 0.25), (16, 64, 1.0), (16, 8, 1.0), (8, 4, 1.0)]
)
def test_an_engine_reduces_by_itself_among_few_ranks_of_one_host(tp: int, node: int, share: float) -> None:
    live = np.array([16.0])
    own, library = (
        Engine(LLAMA, rows(tp=tp, node_size=node), site(constants={"generation.reduce": reduce})).step(live, live)
        for reduce in (0.25, 1.0)
    )
    assert own.reduce == pytest.approx(share * library.reduce)


def test_waves_repeat_the_tail_and_refilling_does_not() -> None:
    one_bytes = 32 * 2 * 8 * 128 * 2 * 5120
    waves = seconds(micro_batch=32, kv_bytes=32 * one_bytes, where=site(constants={"generation.refill": 0.0}))
    refilled = seconds(micro_batch=32, kv_bytes=32 * one_bytes)
    unlimited = seconds()
    assert unlimited < refilled < waves
    # 256 sequences in 8 waves of 32, each as long as the longest sequence.
    assert waves == pytest.approx(8 * seconds(dp=8, where=site(constants={"generation.refill": 0.0})), rel=0.05)


def test_a_larger_kv_budget_never_takes_longer() -> None:
    one_bytes = 32 * 2 * 8 * 128 * 2 * 5120
    found = [seconds(micro_batch=size, kv_bytes=size * one_bytes) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_token_crosses_every_boundary_once_and_returns(pp: int) -> None:
    """With a second a message: pp - 1 for the prompts' pass, pp for each of 100 tokens."""
    workload = Workload(8, 1, Lengths.constant(16), Lengths.constant(100), 8, 100)
    fast = site(constants={"generation.refill": 0.0})
    slow = replace(fast, intra=replace(fast.intra, latency_s=fast.intra.latency_s + 1))
    extra_s = seconds(workload=workload, where=slow, pp=pp) - seconds(workload=workload, where=fast, pp=pp)
    assert extra_s == pytest.approx(pp - 1 + 100 * pp)


def test_pp_ranks_take_turns() -> None:
    one, two = (generate(LLAMA, rows(pp=pp), WORKLOAD, site()) for pp in (1, 2))
    # The work is the same, halved for each rank, and every token waits for the other rank.
    assert two.ideal["decode"][0] == pytest.approx(one.ideal["decode"][0] / 2, rel=0.1)
    assert two.ideal["pp"][0] > 0.9 * two.ideal["decode"][0]


def test_tp_reads_less_and_pays_for_it_with_messages() -> None:
    one, four = (generate(LLAMA, rows(tp=tp), WORKLOAD, site()) for tp in (1, 4))
    assert "tp" not in one.ideal
    assert four.ideal["decode"][0] < 0.5 * one.ideal["decode"][0]
    across = generate(LLAMA, rows(tp=4, node_size=2), WORKLOAD, site())
    assert across.ideal["tp"][0] > 2 * four.ideal["tp"][0]


def test_an_engine_without_graphs_waits_for_its_launches() -> None:
    eager, graphs = (seconds(tp=8, where=site(constants={"generation.launches": share})) for share in (1.0, 0.02))
    where = site()
    assert 0 < eager - graphs < 34 * where.rates.launch_s * 33 * 4096
    assert eager > 1.05 * graphs


def test_ideal_seconds_weigh_to_the_price() -> None:
    where = site()
    price: CallPrices = generate(LLAMA, rows(tp=2, pp=4, dp=2), WORKLOAD, where)
    assert price.seconds == pytest.approx(where.weigh(price.ideal))


def test_rows_are_priced_alone_as_among_others() -> None:
    deals = [(1, 1, 1), (2, 1, 4), (1, 4, 2), (4, 2, 3), (8, 1, 7), (2, 3, 5)]
    candidates = [Candidate(GENERATION, Layout(tp, pp), dp) for tp, pp, dp in deals]
    together = generate(LLAMA, Rows.of(candidates, 32, 8), WORKLOAD, site())
    for index, candidate in enumerate(candidates):
        alone = generate(LLAMA, Rows.of([candidate], 32, 8), WORKLOAD, site())
        assert together.seconds[index] == pytest.approx(alone.seconds[0])


@given(
    tp=st.sampled_from([1, 2, 4]),
    dp=st.integers(1, 16),
    mean=st.floats(10.0, 500.0),
    more=st.floats(1.0, 4.0),
    gpu=st.booleans(),
)
def test_longer_sequences_never_take_less_time(tp: int, dp: int, mean: float, more: float, gpu: bool) -> None:
    (cpu,) = cluster(8).kinds.values()
    where = site() if gpu else site(cpu, "fp32")

    def priced(prompt: float, response: float) -> float:
        lengths = Lengths(response, 1.5 * response, 2 * response)
        workload = Workload(16, 2, Lengths.constant(prompt), lengths, 32, 10_000)
        return float(generate(SMALL, rows(SMALL, tp=tp, dp=dp), workload, where).seconds[0])

    once = priced(100.0, mean)
    assert priced(100.0, more * mean) >= once * (1 - 1e-9)
    assert priced(more * 100.0, mean) >= once * (1 - 1e-9)
