"""All parts of the planner's benchmark: `python -m benchmarks.planner --data DIR [--json FILE] [--only PART ...]`.

A part that is not there, or whose data is not, is a line that says so; one that fails is a line too, and the exit code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks._parts import failed, measured, table
from benchmarks._result import Result

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
        found[part] = measured("benchmarks.planner", part, data=given.data)
        took_s[part] = time.perf_counter() - began
        print(f"{part}: {took_s[part]:.0f} s", file=sys.stderr)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table("planner", [line for lines in found.values() for line in lines]))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        lines = {
            part: {"took_s": took_s[part], "results": [line.as_json for line in lines]} for part, lines in found.items()
        }
        given.json.write_text(json.dumps(lines, indent=2, default=str, allow_nan=False) + "\n")
    return int(any(map(failed, found.values())))


if __name__ == "__main__":
    sys.exit(main())
