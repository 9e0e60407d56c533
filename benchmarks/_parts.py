"""Parts of a benchmark, each a module of its package with `run(...)`: how one is run and how its lines are shown."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rich.table import Table

from benchmarks._result import Result

FAILED = "failed: "


def measured(package: str, part: str, **given: Any) -> tuple[Result, ...]:
    """The lines of one part, run with what is given; a part that breaks must not take the others with it."""
    name = f"{package}.{part}"
    if find_spec(name) is None:
        return (_unmeasured(part, "not there"),)
    try:
        return tuple(import_module(name).run(**given))
    except FileNotFoundError as error:
        return (_unmeasured(part, f"{'no data: ' if 'data' in given else FAILED}{error.filename}"),)
    except ModuleNotFoundError as error:
        ours = str(error.name).partition(".")[0] in ("nereus", "benchmarks")
        return (_unmeasured(part, f"{FAILED if ours else 'skipped: '}{error}"),)
    except Exception as error:
        return (_unmeasured(part, f"{FAILED}{error!r}"),)


def failed(lines: Sequence[Result]) -> bool:
    """Whether a part broke."""
    return any(line.notes.startswith(FAILED) for line in lines)


def table(title: str, lines: Sequence[Result]) -> Table:
    """One row a result."""
    shown = Table(*("what", "target", "ours", "other side", "ratio", "met", "notes"), title=title)
    for line in lines:
        met = {None: "", True: "yes", False: "NO"}[line.met]
        numbers = (line.measured, line.baseline, line.ratio)
        shown.add_row(line.name, line.target, *map(number, numbers), met, line.notes)
    return shown


def number(value: float | None) -> str:
    """Four digits; nothing for what was not measured."""
    return "" if value is None or value != value else f"{value:.4g}"


def _unmeasured(part: str, why: str) -> Result:
    return Result(part, "report", float("nan"), notes=why)
