"""What one part of a benchmark answers: a measured number beside its target and the other side's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. A part is a module with `run(...)`, which answers with lines."""

    name: str
    """What was measured, with its unit, such as "vTrain single node, MAPE %"."""
    target: str
    """In words and numbers, such as "<= 6.6", or "report" where there is none."""
    measured: float
    """Ours."""
    baseline: float | None = None
    """The other side's, measured in the same run."""
    ratio: float | None = None
    """Other side / ours, in the sense the target speaks of."""
    met: bool | None = None
    """None where there is nothing to meet, or the part could not be measured (then `notes` says why)."""
    notes: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    """Numbers behind the line, for the JSON only."""

    @property
    def as_json(self) -> dict[str, Any]:
        """The line as plain values: strings for keys, null for what is not a number."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


def at_most(name: str, limit: float, measured: float, **rest: Any) -> Result:
    """A line that is met by a number no greater than the limit."""
    return Result(name, f"<= {limit:g}", measured, met=measured <= limit, **rest)


def at_least(name: str, limit: float, measured: float, **rest: Any) -> Result:
    """A line that is met by a number no smaller than the limit."""
    return Result(name, f">= {limit:g}", measured, met=measured >= limit, **rest)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):  # also numpy's float64
        return float(value) if math.isfinite(value) else None
    return value
