"""Take changes that save time at every n-th step only, whatever they cost: a baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nereus import core


@dataclass(frozen=True)
class EveryN:
    """`n` is the number of steps between chances to change."""

    n: int = 3
    margin: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise core.SettingsError(f"admission: n {self.n}, must be at least 1")

    def admits(self, payback: core.Payback, step: int) -> tuple[bool, str]:
        """Whether this is an n-th step and anything is saved."""
        if step % self.n:
            return False, f"step {step} is not a multiple of {self.n}; {payback.describe()}"
        return payback.saving_s > 0, payback.describe()
