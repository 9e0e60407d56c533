"""All parts of the transitions' benchmark: `python -m benchmarks.transitions [--json FILE] [--only PART] [--quick]`.

A part is a module with `run(quick=...)`, which answers with lines of the table, and maybe `tables(lines)` for more. One
that is not there, lacks a library or fails is a line that says so.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks._parts import failed, measured, table
from benchmarks.transitions.sides import Watch

PARTS = (
    "planning",
    "routes",
    "bytes",
    "examples",
    "schedule",
    "smallest",
    "solver",
    "reshard",
    "extend",
    "scale_out",
    "doubling",
    "sync",
    "layouts",
    "overlap",
)
WIDTH = 170


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the tables, write the JSON; 1 when a part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transitions", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write every number here")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="a small state, few runs: shows that it works, no numbers")
    given = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    found: dict[str, dict[str, object]] = {}
    broken = False
    for part in given.only:
        watch, began_s = Watch(), time.perf_counter()
        lines = measured("benchmarks.transitions", part, quick=given.quick)
        took_s, load = time.perf_counter() - began_s, watch.read()
        found[part] = {
            "took_s": took_s,
            "load_before": load.before,
            "busy_cores": load.busy_cores,
            "results": [line.as_json for line in lines],
        }
        if given.json is not None:
            write(given.json, found)
        console.print(table(f"{part} ({took_s:.0f} s; {load})", lines))
        more = getattr(sys.modules.get(f"benchmarks.transitions.{part}"), "tables", None)
        for shown in () if more is None else more(lines):
            console.print(shown)
        broken = broken or failed(lines)
    return int(broken)


def write(path: Path, found: Mapping[str, object]) -> None:
    """After each part, and whole or not at all: a run that is interrupted keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(found, indent=2, default=str, allow_nan=False) + "\n")
    fresh.replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended and its files go
    sys.exit(main())
