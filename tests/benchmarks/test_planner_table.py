"""The planner's benchmark: parts that are missing, lack data or break are lines of the table, not the end of it."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmarks._result import Result, at_least, at_most
from benchmarks.planner import __main__ as bench

from benchmarks import _parts


def test_limits_decide_what_is_met() -> None:
    assert at_most("error", 5.0, 5.0).met
    assert not at_most("error", 5.0, 5.1).met
    assert at_least("share", 90.0, 90.0).met
    assert not at_least("share", 90.0, 89.9).met


def test_every_part_is_a_line_whatever_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lacking(data: Path) -> list[Result]:
        return [Result("read", "report", len((data / "none.csv").read_text()))]

    def breaking(data: Path) -> list[Result]:
        raise ZeroDivisionError(str(data))

    def working(data: Path) -> list[Result]:
        return [at_most("works", 2.0, 1.0, baseline=4.0, ratio=4.0)]

    for name, run in (("serving", lacking), ("rows", breaking), ("memory", working)):
        module = ModuleType(f"benchmarks.planner.{name}")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_parts, "find_spec", lambda name: None if name.endswith("vtrain") else object())
    out = tmp_path / "build" / "bench.json"
    parts = ["vtrain", "serving", "rows", "memory"]
    assert bench.main(["--data", str(tmp_path), "--json", str(out), "--only", *parts]) == 1
    lines = {part: entry["results"][0] for part, entry in json.loads(out.read_text()).items()}
    assert lines["vtrain"]["notes"] == "not there"
    assert "none.csv" in lines["serving"]["notes"]
    assert "ZeroDivisionError" in lines["rows"]["notes"]
    assert (lines["memory"]["met"], lines["memory"]["ratio"]) == (True, 4.0)


@pytest.mark.parametrize(
    ("missing", "note", "status"),
    [("torch", "skipped: no torch", 0), ("nereus.cost.gone", "failed: no nereus.cost.gone", 1)],
)
def test_a_part_without_a_library_is_skipped_one_without_our_own_module_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, note: str, status: int
) -> None:
    def run(data: Path) -> list[Result]:
        raise ModuleNotFoundError(f"no {missing}", name=missing)

    module = ModuleType("benchmarks.planner.any_dp")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_parts, "find_spec", lambda _: object())
    out = tmp_path / "bench.json"
    assert bench.main(["--data", str(tmp_path), "--json", str(out), "--only", "any_dp"]) == status
    assert json.loads(out.read_text())["any_dp"]["results"][0]["notes"] == note


def test_a_line_is_valid_json_whatever_its_details_are() -> None:
    details: dict[Any, Any] = {"count": Counter({"a": 2}), 3: (np.float64(0.5), float("nan")), "under": {2: math.inf}}
    line = Result("line", "report", float("nan"), details=details)
    plain = json.loads(json.dumps(line.as_json, allow_nan=False))
    assert plain["measured"] is None
    assert plain["details"] == {"count": {"a": 2}, "3": [0.5, None], "under": {"2": None}}


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--data", str(tmp_path / "none")])
