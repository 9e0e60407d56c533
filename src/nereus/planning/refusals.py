"""Why candidates were refused: a count for each reason, and a few examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nereus.core import Rejection

EXAMPLES = 3


@dataclass(slots=True)
class _Reason:
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Refusals:
    """Counts by reason. Names are made of the examples alone, since there may be thousands of candidates."""

    found: dict[str, _Reason] = field(default_factory=dict)

    def add(self, reason: str, rows: Sequence[int], name: Callable[[int], str]) -> None:
        """Count `rows` under a reason; `name` says what a row is."""
        if not len(rows):
            return
        entry = self.found.setdefault(reason, _Reason())
        entry.count += len(rows)
        entry.examples += [name(int(row)) for row in rows[: EXAMPLES - len(entry.examples)]]

    def note(self, reason: str, name: str) -> None:
        """Count one thing that is not a row."""
        self.add(reason, [0], lambda _: name)

    def all(self) -> tuple[Rejection, ...]:
        """The examples of every reason; the first of each stands for all that are not named."""
        return tuple(
            Rejection(name, reason, entry.count - len(entry.examples) + 1 if index == 0 else 1)
            for reason, entry in self.found.items()
            for index, name in enumerate(entry.examples)
        )
