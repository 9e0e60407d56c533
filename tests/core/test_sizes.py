from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import SettingsError
from nereus.core.sizes import rate_bytes_per_s, show_bytes, size_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24 MiB", 24 * 2**20),
        ("80 GB", 80 * 10**9),
        ("1.5kb", 1500),
        ("7", 7),
        (7, 7),
        ("2e3 B", 2000),
        ("1 TiB", 2**40),
    ],
)
def test_sizes_become_bytes(text: str | int, size: int) -> None:
    assert size_bytes(text, "capacity") == size


@pytest.mark.parametrize(
    "text", ["", "MB", "3 XB", "-1 MB", "0 GB", 0, -5, "1 GB/s", True, 0.5, math.nan, math.inf, "9e999 GB", 10**400]
)
def test_what_is_no_size_is_refused_by_name(text: str | int) -> None:
    with pytest.raises(SettingsError, match="capacity"):
        size_bytes(text, "capacity")


def test_rates_are_sizes_per_second() -> None:
    assert rate_bytes_per_s("25 GB/s", "rate") == rate_bytes_per_s("25 GB", "rate") == 25e9


@given(st.integers(1, 10**15))
def test_a_shown_size_reads_back_within_its_digits(size: int) -> None:
    assert size_bytes(show_bytes(size), "x") == pytest.approx(size, rel=0.01)
