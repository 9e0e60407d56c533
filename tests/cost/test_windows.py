"""Sliding windows: pairs and tokens counted one by one, and what generation and its cache make of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.clusters.named import machine
from nereus.core import Calibration, Candidate, Layout, Lengths, ModelSpec, Workload
from nereus.cost.decoding import Engine
from nereus.cost.generation import generate
from nereus.cost.kernels import Rates
from nereus.cost.memory import sequence_kv_bytes
from nereus.cost.rows import Rows
from nereus.cost.site import Site
from nereus.cost.windows import cached_tokens, seen_pairs
from tests.cost.jobs import GENERATION

WHOLE = ModelSpec("gemma3_text", 12, 256, 8, 2, 32, 512, 512, dtype="bf16")
KINDS = tuple(machine("h100").kinds.values())
NEAR = replace(WHOLE, window=64, full_every=6)


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 4))
def test_counted_by_hand(tokens: int, window: int, every: int) -> None:
    spec = replace(WHOLE, window=window, full_every=every)
    layers = [layer % every == every - 1 for layer in range(12)]
    kept = [tokens if whole else min(tokens, window) for whole in layers]
    assert cached_tokens(spec, tokens) == pytest.approx(sum(kept) / 12)
    pairs = [sum(min(at + 1, tokens if whole else window) for at in range(tokens)) for whole in layers]
    every_pair = tokens * (tokens + 1) / 2
    assert seen_pairs(spec, tokens) == pytest.approx(sum(pairs) / 12 / every_pair, abs=1.2 / tokens)


def test_a_cache_holds_windows_of_most_layers() -> None:
    work = Workload(4, 1, Lengths.constant(256), Lengths.constant(768), 4, 768)
    bytes_each = 2 * 2 * 32 * 2
    assert sequence_kv_bytes(WHOLE, Layout(), work, KINDS) == 12 * 1024 * bytes_each
    assert sequence_kv_bytes(NEAR, Layout(), work, KINDS) == (2 * 1024 + 10 * 64) * bytes_each
    short = replace(work, prompt=Lengths.constant(16), response=Lengths.constant(32), max_response_tokens=32)
    assert sequence_kv_bytes(NEAR, Layout(), short, KINDS) == sequence_kv_bytes(WHOLE, Layout(), short, KINDS)


def test_decoding_reads_windows_and_long_contexts_cost_less() -> None:
    cluster = machine("h100")
    kind = cluster.kinds["h100"]
    site = Site(Rates.of(kind, "bf16"), cluster.links["intra"], cluster.links["inter"], Calibration(), (kind,))
    candidates = [Candidate(GENERATION, Layout(), 1, micro_batch=32)]
    rows = Rows.of(candidates, WHOLE.layers, node_size=8)
    live = np.array([32.0])
    near, whole = (Engine(spec, rows, site) for spec in (NEAR, WHOLE))
    context = np.array([30_000.0])
    same = np.array([30_000 / 6 + 64 * 5 / 6])
    assert near.step(live, context).dense == pytest.approx(whole.step(live, same).dense)
    work = Workload(32, 1, Lengths.constant(2000), Lengths.constant(6000), 32, 6000)
    near_s, whole_s = (generate(spec, rows, work, site).seconds[0] for spec in (NEAR, WHOLE))
    assert near_s < whole_s
