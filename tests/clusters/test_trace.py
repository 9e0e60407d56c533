from __future__ import annotations

from pathlib import Path

import pytest

from nereus.clusters.trace import Trace
from nereus.core import Boundary, SettingsError

POOL = {"use": "local", "devices": 6, "capacity": "24 MiB", "speed": 0.3, "cores": 2}


def trace(tmp_path: Path, text: str, pool: dict[str, object] | None = None) -> Trace:
    path = tmp_path / "pool.csv"
    path.write_text(text)
    return Trace(str(path), pool or POOL)


def test_the_last_row_that_is_not_later_than_the_boundary_holds(tmp_path: Path) -> None:
    source = trace(tmp_path, "step,devices\n0,4\n10,5\n20,3\n")
    counts = {step: len(source.available(Boundary(step, 0.0))) for step in (0, 9, 10, 19, 20, 999)}
    assert counts == {0: 4, 9: 4, 10: 5, 19: 5, 20: 3, 999: 3}
    assert source.available(Boundary(0, 0.0)) == {0, 1, 2, 3}


def test_before_its_first_row_a_trace_shows_the_first_row(tmp_path: Path) -> None:
    assert trace(tmp_path, "step,devices\n5,2\n").available(Boundary(0, 0.0)) == {0, 1}


def test_seconds_follow_the_clock_and_not_the_step(tmp_path: Path) -> None:
    source = trace(tmp_path, "seconds,devices\n0,1\n2.5,2\n")
    assert len(source.available(Boundary(100, 2.4))) == 1
    assert len(source.available(Boundary(0, 2.5))) == 2


def test_devices_can_be_named(tmp_path: Path) -> None:
    source = trace(tmp_path, "step,devices\n0,0;3;5\n4,2;\n")
    assert source.available(Boundary(0, 0.0)) == {0, 3, 5}
    assert source.available(Boundary(4, 0.0)) == {2}


def test_the_pool_is_that_of_its_own_source(tmp_path: Path) -> None:
    assert trace(tmp_path, "step,devices\n0,1\n").cluster().ids == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("step,devices\n0,4\n3,0\n", 3, "zero devices"),
        ("step,devices\n0,;\n", 2, "zero devices"),
        ("step,gpus\n0,4\n", 1, "header 'step,gpus', valid: step,devices or seconds,devices"),
        ("", 1, "header"),
        ("step,devices\n0,4\n5,3\n5,2\n", 4, "step 5 is not later than 5"),
        ("step,devices\n0,4\n5,3\n2,2\n", 4, "step 2 is not later than 5"),
        ("step,devices\n0,9\n", 2, "9 devices, the pool has 6"),
        ("step,devices\n0,1;8\n", 2, r"unknown devices \[8\]"),
        ("step,devices\n0,four\n", 2, "expected a number"),
        ("step,devices\n0,1,2\n", 2, "3 columns"),
        ("step,devices\n-1,2\n", 2, "must be at least 0"),
        ("step,devices\nnan,2\n", 2, "must be at least 0"),
    ],
)
def test_a_bad_trace_is_refused_with_its_file_and_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        trace(tmp_path, text)
    assert f"pool.csv:{line}:" in str(caught.value)


def test_a_trace_without_rows_or_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no rows"):
        trace(tmp_path, "step,devices\n")
    with pytest.raises(SettingsError, match="cannot be read"):
        Trace(str(tmp_path / "missing.csv"), POOL)
    (tmp_path / "pool.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="is not text"):
        Trace(str(tmp_path / "pool.csv"), POOL)


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    assert trace(tmp_path, "\ufeffstep,devices\n0,2\n").available(Boundary(0, 0.0)) == {0, 1}


def test_options_of_the_pool_are_checked_as_those_of_its_source(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="unknown option 'device'"):
        trace(tmp_path, "step,devices\n0,1\n", {"use": "local", "device": 6, "capacity": "1 MB"})
