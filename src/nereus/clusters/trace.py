"""Devices that come and go by a CSV file: `step,devices` or `seconds,devices`.

A row holds from its step (or second) on. `devices` is a count (the first ids) or ids joined by `;`.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus.core import Boundary, Cluster, SettingsError, plugins
from nereus.core.ports import ClusterSource

HEADERS = (["step", "devices"], ["seconds", "devices"])


@dataclass(frozen=True)
class Trace:
    """`path` is the CSV file; `pool` describes every device that may ever be there, as `cluster:` would."""

    path: str
    pool: Mapping[str, Any]
    _clock: str = field(init=False, repr=False)
    _rows: tuple[tuple[float, frozenset[int]], ...] = field(init=False, repr=False)
    _source: ClusterSource = field(init=False, repr=False)

    def __post_init__(self) -> None:
        options = dict(self.pool)
        source = plugins.make("nereus.clusters", options.pop("use", "local"), options)
        clock, rows = read(Path(self.path), source.cluster().ids)
        for name, value in (("_clock", clock), ("_rows", rows), ("_source", source)):
            object.__setattr__(self, name, value)

    def cluster(self) -> Cluster:
        """Every device of the pool."""
        return self._source.cluster()

    def available(self, boundary: Boundary) -> frozenset[int]:
        """The devices of the last row that is not later than the boundary (before the first row: of the first)."""
        now = boundary.step if self._clock == "step" else boundary.elapsed_s
        index = bisect_right(self._rows, now, key=lambda row: row[0]) - 1
        return self._rows[max(index, 0)][1]


def read(path: Path, ids: tuple[int, ...]) -> tuple[str, tuple[tuple[float, frozenset[int]], ...]]:
    """The clock of a trace and its rows (time, devices). Raises SettingsError with file and line number."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # spreadsheets write a byte order mark
    except OSError as error:
        raise SettingsError(f"trace {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"trace {path}: is not text: {error}") from None
    reader = csv.reader(lines)
    header = [cell.strip() for cell in next(reader, [])]
    if header not in HEADERS:
        valid = " or ".join(",".join(choice) for choice in HEADERS)
        raise SettingsError(f"{path}:1: header {','.join(header)!r}, valid: {valid}")
    rows: list[tuple[float, frozenset[int]]] = []
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        where = f"{path}:{reader.line_num}"
        time, devices = _row(where, cells, ids)
        if rows and time <= rows[-1][0]:
            raise SettingsError(f"{where}: {header[0]} {time:g} is not later than {rows[-1][0]:g} in the row before")
        rows.append((time, devices))
    if not rows:
        raise SettingsError(f"{path}: the trace has no rows")
    return header[0], tuple(rows)


def _row(where: str, cells: list[str], ids: tuple[int, ...]) -> tuple[float, frozenset[int]]:
    if len(cells) != 2:
        raise SettingsError(f"{where}: {len(cells)} columns, expected 2 (ids are joined by ';')")
    try:
        time = float(cells[0])
        named = [int(cell) for cell in cells[1].split(";") if cell.strip()]
    except ValueError:
        raise SettingsError(
            f"{where}: {','.join(cells)!r}: expected a number, and a count or ids joined by ';'"
        ) from None
    if not time >= 0:
        raise SettingsError(f"{where}: time {cells[0]}, must be at least 0")
    if ";" in cells[1]:
        unknown = sorted(set(named) - set(ids))
        if unknown:
            raise SettingsError(f"{where}: unknown devices {unknown}, the pool has {list(ids)}")
        devices = frozenset(named)
    else:
        count = named[0] if named else 0
        if count > len(ids) or count < 0:
            raise SettingsError(f"{where}: {count} devices, the pool has {len(ids)}")
        devices = frozenset(ids[:count])
    if not devices:
        raise SettingsError(f"{where}: zero devices: a job needs at least one")
    return time, devices
