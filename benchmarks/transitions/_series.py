"""Settings in rows and sides in columns, as the paper prints its tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks._result import Result
from benchmarks.transitions.scenario import Scenario
from benchmarks.transitions.sides import Side, compare


def setting(name: str, scenario: Scenario, sides: Sequence[Side], runs: int) -> list[Result]:
    """One line a side: its median seconds; NaN when it could not do it."""
    found = compare(sides, scenario, runs)
    lines = []
    for side in sides:
        one = found[side.name]
        reasons = [one.reason] if one.reason else []
        wrong = [f"WRONG: {len(one.wrong)} tensors"] if one.wrong else []
        details = {
            "setting": name,
            "side": side.name,
            "scenario": scenario.name,
            "bytes": scenario.size.bytes,
            "seconds": one.seconds,
            "minimum_bytes": scenario.minimum_bytes,
            "written_bytes": one.middle("written_bytes"),
        }
        notes = "; ".join([*reasons, *wrong])
        lines.append(Result(f"{name}: {side.name}, s", "report", one.median_s, notes=notes, details=details))
    return lines


def shown(title: str, lines: Sequence[Result]) -> Table:
    """Sides in rows, settings in columns."""
    cells = {(line.details["side"], line.details["setting"]): line for line in lines if "side" in line.details}
    settings = list(dict.fromkeys(setting for _, setting in cells))
    table = Table("System", *settings, title=title)
    for side in dict.fromkeys(side for side, _ in cells):
        row = (_cell(cells.get((side, setting))) for setting in settings)
        table.add_row(side, *row)
    return table


def _cell(line: Result | None) -> str:
    if line is None or line.measured != line.measured:
        return "–"
    return f"{line.measured:.2f}" + (" (wrong)" if "WRONG" in line.notes else "")
