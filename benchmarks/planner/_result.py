"""What one part of the planner's benchmark answers: a measured number beside its target and the other side's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. A part is a module with `run(data: Path) -> list[Result]`."""

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
        """The line as plain values."""
        return asdict(self)


def at_most(name: str, limit: float, measured: float, **rest: Any) -> Result:
    """A line that is met by a number no greater than the limit."""
    return Result(name, f"<= {limit:g}", measured, met=measured <= limit, **rest)


def at_least(name: str, limit: float, measured: float, **rest: Any) -> Result:
    """A line that is met by a number no smaller than the limit."""
    return Result(name, f">= {limit:g}", measured, met=measured >= limit, **rest)
