"""Take every change that saves time, whatever it costs: a baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nereus import core


@dataclass(frozen=True)
class Always:
    """No limit on the payback."""

    margin: float = field(default=math.inf, init=False)

    def admits(self, payback: core.Payback, step: int) -> tuple[bool, str]:  # noqa: ARG002
        """Whether anything is saved."""
        return payback.saving_s > 0, payback.describe()
