"""Constants come out of timings that were made from them, and outliers do little."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nereus.core import DeviceKind, Link
from nereus.cost.kernel_fit import Attentions, Collectives, Gemms, errors, fit_kernels, fit_link

PLANTED = {
    "gemm.start_s": 3e-6,
    "gemm.share": 0.7,
    "gemm.half_k": 150.0,
    "gemm.half_mn": 3e5,
    "gemm.stream": 0.85,
    "gemm.power": 3.0,
    "attention.start_s": 1.5e-5,
    "attention.share": 0.4,
    "attention.half_tokens": 600.0,
}
PLAIN = DeviceKind("plain", 10**9, {"bf16": 1e15}, 3e12, 4e-6)
TRUE = replace(PLAIN, constants=PLANTED)


def gemms() -> Gemms:
    sizes = np.array([[m, n, k] for m in (1, 32, 512, 8192) for n in (1024, 8192) for k in (1024, 4096, 16384)], float)
    m, n, k = sizes.T
    timed = Gemms(m, n, k, np.ones(len(m)))
    return replace(timed, seconds=timed.predicted(TRUE, "bf16"))


def test_products_give_their_constants_back() -> None:
    found = fit_kernels(PLAIN, gemms(), "bf16").constants
    for name in ("gemm.start_s", "gemm.share", "gemm.half_mn", "gemm.stream"):
        assert found[name] == pytest.approx(PLANTED[name], rel=0.05)


def test_an_outlier_does_little() -> None:
    timed = gemms()
    seconds = timed.seconds.copy()
    seconds[::7] *= 5
    found = fit_kernels(PLAIN, replace(timed, seconds=seconds), "bf16")
    assert np.median(errors(timed.predicted(found, "bf16"), timed.seconds)) < 0.05


def test_attention_and_what_was_not_timed_stays() -> None:
    sequences, tokens = (
        np.array(each, float) for each in zip(*[(b, s) for b in (1, 8) for s in (64, 512, 4096, 16384)], strict=True)
    )
    heads = np.full(len(tokens), 16.0)
    timed = Attentions(False, sequences, tokens, heads, heads, 128, np.ones(len(tokens)))
    timed = replace(timed, seconds=timed.predicted(TRUE, "bf16"))
    found = fit_kernels(replace(PLAIN, constants={"launch.power": 10.0}), timed, "bf16").constants
    assert found["attention.share"] == pytest.approx(0.4, rel=0.05)
    assert found["attention.half_tokens"] == pytest.approx(600, rel=0.1)
    assert found["launch.power"] == 10.0
    assert "gemm.share" not in found


def test_collectives_of_several_kinds_and_ranks() -> None:
    planted = {"collective.start_s": 5e-6, "all_reduce.share": 0.8, "gather.share": 0.6, "collective.few_ranks": 0.5}
    true = Link(4e11, 3e-6, planted)
    cases = [(name, n, 4.0**p) for name in ("all_reduce", "all_gather") for n in (2, 4, 8) for p in range(5, 15)]
    names, ranks, sizes = (np.array(each) for each in zip(*cases, strict=True))
    timed = Collectives(names, ranks, sizes, np.ones(len(ranks)), np.ones(len(ranks), np.int64))
    timed = replace(timed, seconds=timed.predicted(true))
    found = fit_link(Link(4e11, 1e-5), timed)
    assert errors(timed.predicted(found), timed.seconds).max() < 0.1
    assert found.constants["gather.share"] / found.constants["all_reduce.share"] == pytest.approx(0.75, rel=0.05)


def test_only_the_constants_asked_for_move() -> None:
    timed = Collectives(
        np.array(["all_reduce"] * 3), np.full(3, 4), np.array([1e4, 1e6, 1e8]), np.ones(3), np.ones(3, int)
    )
    timed = replace(timed, seconds=timed.predicted(Link(1e10, 1e-5, {"all_reduce.share": 0.5})))
    found = fit_link(Link(1e10, 1e-5), timed, ("all_reduce.share",))
    assert found.latency_s == 1e-5
    assert dict(found.constants) == pytest.approx({"all_reduce.share": 0.5}, rel=0.02)
