"""Kernels by size: by hand, at both ends of the roofline, and always longer for more work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.clusters.named import machine, names
from nereus.core import DeviceKind
from nereus.cost.kernels import Rates, attention_s, decode_attention_s, gemm_s, launched_s, stream_s

PLAIN = DeviceKind("plain", 10**9, {"fp32": 1e12, "bf16": 2e12}, 1e11, 1e-5)
TYPES = [next(iter(machine(name).kinds.values())) for name in names()]
sizes = st.integers(1, 20_000).map(float)


def test_without_constants_a_product_is_arithmetic_and_traffic_at_the_peaks() -> None:
    # 2 * 100 * 200 * 300 flops and 2 * (100 * 300 + 300 * 200 + 100 * 200) bytes.
    compute_s, traffic_s = 12e6 / 1e12, 220e3 / 1e11
    assert gemm_s(Rates.of(PLAIN, "fp32"), 100, 200, 300) == pytest.approx(np.hypot(compute_s, traffic_s))


def test_constants_are_used_as_named() -> None:
    constants = {
        "gemm.start_s": 1e-6,
        "gemm.share": 0.5,
        "gemm.half_k": 100.0,
        "gemm.half_mn": 5000.0,
        "gemm.stream": 0.8,
        "gemm.power": 1.0,
    }
    rates = Rates.of(replace(PLAIN, constants=constants), "fp32")
    compute_s = 2 * (100 * 200 + 5000) * (300 + 100) / 0.5e12
    assert gemm_s(rates, 100, 200, 300) == pytest.approx(1e-6 + compute_s + 220e3 / 0.8e11)


def test_attention_by_hand() -> None:
    rates = Rates.of(PLAIN, "bf16")
    # Half of the 4 * tokens * tokens * width products of each head.
    assert attention_s(rates, 3, 128, 4, 64) == pytest.approx(3 * 4 * 4 * 128 * 128 * 64 / 2 / 2e12)
    # Keys and values of 3 sequences, 2 bytes each.
    assert decode_attention_s(rates, 3, 1000, 2, 64) == pytest.approx(3 * 1000 * 2 * 64 * 2 * 2 / 1e11)
    # With many query heads for each cached one the arithmetic takes longer.
    assert decode_attention_s(rates, 3, 1000, 1, 64, heads=1000.0) == pytest.approx(4 * 3 * 1000 * 1000 * 64 / 2e12)


def test_the_host_is_a_floor_under_the_device() -> None:
    rates = Rates.of(PLAIN, "fp32")
    assert launched_s(rates, 1.0, 10) == pytest.approx(1.0, rel=1e-6)
    assert launched_s(rates, 1e-9, 10) == pytest.approx(1e-4, rel=1e-6)
    assert launched_s(rates, 1e-4, 10) == pytest.approx(np.sqrt(2) * 1e-4)


def test_a_paced_device_is_slower_in_everything() -> None:
    whole, half = Rates.of(PLAIN, "fp32"), Rates.of(replace(PLAIN, speed=0.5), "fp32")
    assert gemm_s(half, 64, 64, 64) == pytest.approx(2 * gemm_s(whole, 64, 64, 64))
    assert stream_s(half, 1e6) == pytest.approx(2 * stream_s(whole, 1e6))
    assert launched_s(half, 0.0, 5) == pytest.approx(2 * launched_s(whole, 0.0, 5))


@pytest.mark.parametrize("kind", [PLAIN, *TYPES], ids=lambda kind: kind.name)
@given(m=sizes, n=sizes, k=sizes, more=st.floats(1.0, 4.0))
def test_more_work_never_takes_less_time(kind: DeviceKind, m: float, n: float, k: float, more: float) -> None:
    rates = Rates.of(kind, "bf16")
    once = gemm_s(rates, m, n, k)
    assert np.isfinite(once)
    assert once >= 2 * m * n * k / rates.flops_per_s
    for larger in (gemm_s(rates, more * m, n, k), gemm_s(rates, m, more * n, k), gemm_s(rates, m, n, more * k)):
        assert larger >= once * (1 - 1e-12)
    assert attention_s(rates, m, more * n, 8, 128) >= attention_s(rates, m, n, 8, 128)
    assert decode_attention_s(rates, m, more * n, 8, 128) >= decode_attention_s(rates, m, n, 8, 128)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_large_products_reach_most_of_the_peak_and_single_rows_most_of_the_bandwidth(kind: DeviceKind) -> None:
    rates = Rates.of(kind, "bf16")
    assert 0.6 < 2 * 8192**3 / rates.flops_per_s / gemm_s(rates, 8192, 8192, 8192) < 1
    assert 0.5 < 2 * 8192**2 / rates.bytes_per_s / gemm_s(rates, 1, 8192, 8192) < 1


def test_low_precisions_apply_to_products_alone() -> None:
    kind = next(kind for kind in TYPES if kind.name == "h200")
    fp8, bf16 = Rates.of(kind, "fp8"), Rates.of(kind, "bf16")
    assert fp8.low_bytes == 1.0
    assert gemm_s(fp8, 8192, 8192, 8192) < 0.7 * gemm_s(bf16, 8192, 8192, 8192)
    assert attention_s(fp8, 8, 4096, 32, 128) == attention_s(bf16, 8, 4096, 32, 128)


def test_a_mixed_group_goes_at_the_pace_of_its_slowest() -> None:
    slow = replace(PLAIN, name="slow", peak_flops={"fp32": 1e11}, launch_s=1e-6)
    both = Rates.slowest([PLAIN, slow], "fp32")
    assert (both.flops_per_s, both.bytes_per_s, both.launch_s) == (1e11, 1e11, 1e-5)
