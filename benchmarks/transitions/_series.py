"""Settings in rows and sides in columns, as the paper prints its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from rich.table import Table

from benchmarks._result import Result
from benchmarks.transitions.scenario import Scenario
from benchmarks.transitions.sides import Measured, Side, compare


def setting(name: str, scenarios: Sequence[Scenario], sides: Sequence[Side], runs: int) -> list[Result]:
    """One line a side: the mean over the scenarios of its median seconds; NaN when it could not do one of them."""
    found: list[Mapping[str, Measured]] = [compare(sides, scenario, runs) for scenario in scenarios]
    lines = []
    for side in sides:
        each = [one[side.name] for one in found]
        seconds = mean(one.median_s for one in each)
        reasons = {one.reason for one in each if one.reason}
        wrong = sum(len(one.wrong) for one in each)
        notes = "; ".join([*sorted(reasons), *([f"WRONG: {wrong} tensors"] if wrong else [])])
        details = {
            "setting": name,
            "side": side.name,
            "bytes": scenarios[0].size.bytes,
            "seconds": {scenario.name: one.seconds for scenario, one in zip(scenarios, each, strict=True)},
            "minimum_bytes": {scenario.name: scenario.minimum_bytes for scenario in scenarios},
            "written_bytes": {s.name: one.middle("written_bytes") for s, one in zip(scenarios, each, strict=True)},
        }
        lines.append(Result(f"{name}: {side.name}, s", "report", seconds, notes=notes, details=details))
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
