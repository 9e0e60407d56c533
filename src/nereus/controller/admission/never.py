"""Refuse every opportunistic change; urgent ones are not asked about."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereus import core


@dataclass(frozen=True)
class Never:
    """Margin 0: only urgent changes happen."""

    margin: float = field(default=0.0, init=False)

    def admits(self, payback: core.Payback, step: int) -> tuple[bool, str]:  # noqa: ARG002
        """Never."""
        return False, f"the rule never changes opportunistically; {payback.describe()}"
