"""Eq. (2): a change must repay itself within a part of the time it can be expected to last."""

from __future__ import annotations

from dataclasses import dataclass

from nereus import core


@dataclass(frozen=True)
class Payback:
    """`margin` is the share of the horizon within which the savings must repay the transition."""

    margin: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= 1:
            raise core.SettingsError(f"admission: margin {self.margin}, must be from 0 (urgent changes only) to 1")

    def admits(self, payback: core.Payback, step: int) -> tuple[bool, str]:  # noqa: ARG002
        """Whether Eq. (2) holds."""
        return payback.admitted and self.margin > 0, payback.describe()
