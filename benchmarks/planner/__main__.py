"""All parts of the planner's benchmark: `python -m benchmarks.planner --data DIR [--json FILE] [--only PART ...]`.

A part that is not there, or whose data is not, is a line that says so; one that fails is a line too, and the exit code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.planner._result import Result

PARTS = ("search", "vtrain", "rows", "fit_rows", "memory", "serving", "kernels", "imports", "any_dp")
WIDTH = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the table, write the JSON; 1 when a part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the public tables")
    parser.add_argument("--json", type=Path, help="also write every number here")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    given = parser.parse_args(arguments)
    if not given.data.is_dir():
        parser.error(f"--data {given.data}: no such folder")
    found: dict[str, tuple[Result, ...]] = {}
    took_s: dict[str, float] = {}
    for part in given.only:
        began = time.perf_counter()
        found[part] = measured(part, given.data)
        took_s[part] = time.perf_counter() - began
        print(f"{part}: {took_s[part]:.0f} s", file=sys.stderr)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table([line for lines in found.values() for line in lines]))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        lines = {
            part: {"took_s": took_s[part], "results": [line.as_json for line in lines]} for part, lines in found.items()
        }
        given.json.write_text(json.dumps(lines, indent=2, default=str, allow_nan=False) + "\n")
    return int(any(line.notes.startswith(FAILED) for lines in found.values() for line in lines))


FAILED = "failed: "


def measured(part: str, data: Path) -> tuple[Result, ...]:
    """The lines of one part; a part that breaks must not take the others with it."""
    name = f"benchmarks.planner.{part}"
    if find_spec(name) is None:
        return (Result(part, "report", float("nan"), notes="not there"),)
    try:
        return tuple(import_module(name).run(data))
    except FileNotFoundError as error:
        return (Result(part, "report", float("nan"), notes=f"no data: {error.filename}"),)
    except ModuleNotFoundError as error:
        ours = str(error.name).partition(".")[0] in ("nereus", "benchmarks")
        return (Result(part, "report", float("nan"), notes=f"{FAILED if ours else 'skipped: '}{error}"),)
    except Exception as error:
        return (Result(part, "report", float("nan"), notes=f"{FAILED}{error!r}"),)


def table(lines: Sequence[Result]) -> Table:
    """One row a result."""
    shown = Table(*("what", "target", "ours", "other side", "ratio", "met", "notes"), title="planner")
    for line in lines:
        met = {None: "", True: "yes", False: "NO"}[line.met]
        numbers = (line.measured, line.baseline, line.ratio)
        shown.add_row(line.name, line.target, *map(number, numbers), met, line.notes)
    return shown


def number(value: float | None) -> str:
    """Four digits; nothing for what was not measured."""
    return "" if value is None or value != value else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
