"""The planner's benchmark: parts that are missing, lack data or break are lines of the table, not the end of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.planner import __main__ as bench
from benchmarks.planner._result import Result, at_least, at_most


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
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name.endswith("vtrain") else object())
    out = tmp_path / "build" / "bench.json"
    parts = ["vtrain", "serving", "rows", "memory"]
    assert bench.main(["--data", str(tmp_path), "--json", str(out), "--only", *parts]) == 1
    lines = {part: entry["results"][0] for part, entry in json.loads(out.read_text()).items()}
    assert lines["vtrain"]["notes"] == "not there"
    assert "none.csv" in lines["serving"]["notes"]
    assert "ZeroDivisionError" in lines["rows"]["notes"]
    assert (lines["memory"]["met"], lines["memory"]["ratio"]) == (True, 4.0)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--data", str(tmp_path / "none")])
