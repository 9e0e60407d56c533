"""What recorders write can be read back whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nereus.controller.replay import Entry
from nereus.core import (
    Boundary,
    Decision,
    Destroy,
    Edge,
    EdgeKind,
    Keep,
    Outcome,
    Plan,
    Rejection,
    Restart,
    SettingsError,
    Split,
    TransitionDAG,
    Trigger,
    codec,
    expand,
)
from nereus.report.recorders.jsonl import Jsonl, read
from tests.fakes import adapt, lengths, plan, proposal, seen, state

NOW, TARGET = plan(0, 1, tp=2), plan(0, 1)


def moved() -> TransitionDAG:
    """A transition with both kinds of edges and primitives."""
    start, goal = expand(NOW), expand(TARGET)
    split = Split("split", start.units, goal.units, "g0", {0: 10, 1: 10}, {})
    destroy = Destroy("destroy", start.units, (), "g0", {}, {0: 5, 1: 5})
    return TransitionDAG(start, goal, (split, destroy), (Edge("split", "destroy", EdgeKind.STATE),))


def entries() -> list[Entry]:
    chosen = replace(proposal(NOW, TARGET, 1.0, 0.4, 0.8), dag=moved())
    outcome = Outcome(expand(TARGET), True, 0.7, {0: 3}, {1: 3}, {"split": 0.6, "destroy": 0.1})
    facts = seen(4, [0, 1], peaks={0: 100, 1: 90}, response=lengths(12.5), departing=frozenset({3}))
    trigger = Trigger("length", False, "length 10.0 → 14.0, +40%")
    decisions: list[tuple[Decision, Outcome | None]] = [
        (Keep("no", (Rejection("x", "too slow"),)), None),
        (adapt(chosen), outcome),
        (Restart(TARGET, "nothing else"), None),
    ]
    return [
        Entry(Boundary(4 + index, 9.5), facts, (trigger,), decision, outcome)
        for index, (decision, outcome) in enumerate(decisions)
    ]


def record(directory: Path) -> None:
    sink = Jsonl(directory)
    sink.begin(state(NOW))
    for entry in entries():
        sink.record(entry.boundary, entry.seen, entry.triggers, entry.decision, entry.outcome)


def test_every_tick_is_read_back_as_it_was(tmp_path: Path) -> None:
    record(tmp_path)
    (part,) = read(tmp_path)
    assert part.state == state(NOW)
    assert list(part.entries) == entries()


def test_a_resumed_run_is_a_second_part(tmp_path: Path) -> None:
    record(tmp_path)
    record(tmp_path)
    assert [len(part.entries) for part in read(tmp_path)] == [3, 3]


def test_each_plan_that_took_effect_is_a_file(tmp_path: Path) -> None:
    record(tmp_path)
    found: dict[str, Plan] = {}
    for path in (tmp_path / "plans").iterdir():
        found[path.name] = codec.decode(Plan, json.loads(path.read_text()))
    assert found == {"step-0.json": NOW, "step-5.json": TARGET, "step-6.json": TARGET}


def test_metrics_are_one_line_a_step(tmp_path: Path) -> None:
    sink = Jsonl(str(tmp_path))
    sink.metrics(1, {"nereus/devices": 4.0})
    sink.metrics(2, {"nereus/devices": 5.0})
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "nereus/devices": 4.0}, {"step": 2, "nereus/devices": 5.0}]


@pytest.mark.parametrize("broken", ["{not json", '{"tick": {}}', '{"other": 1}'])
def test_a_broken_line_is_named(tmp_path: Path, broken: str) -> None:
    record(tmp_path)
    with (tmp_path / "decisions.jsonl").open("a") as file:
        file.write(broken + "\n")
    with pytest.raises(SettingsError, match=r"decisions.jsonl:5: not a record"):
        read(tmp_path)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        read(tmp_path)
