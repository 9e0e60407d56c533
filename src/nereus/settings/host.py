"""What a job's host can do, as flags say it: which degrees and techniques the planner may choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus.core import SettingsError
from nereus.core.plan import RECOMPUTE

ZERO = (0, 1, 2, 3)
DP = ("any", "powers")


@dataclass(frozen=True, slots=True)
class Host:
    """The flags as given; None or False where one was left out. Lists are joined by commas."""

    made_for: str | None = None
    """The framework, with its backend where that is not the usual one, that is to run the plan."""
    dp: str | None = None
    recompute: str | None = None
    zero: str | None = None
    cp: str | None = None
    vpp: str | None = None
    expert_parallel: bool = False
    sequence_parallel: bool = False
    offload: bool = False
    even_shares: bool = False

    def capabilities(self) -> Mapping[str, object]:
        """The fields of `Capabilities` that the flags set. Raises SettingsError for values that do not exist."""
        fields: dict[str, object] = {}
        if self.dp is not None:
            fields["dp"] = _chosen("--dp", self.dp, DP)[0]
        if self.recompute is not None:
            fields["recompute"] = _chosen("--recompute", self.recompute, RECOMPUTE)
        if self.zero is not None:
            fields["zero"] = tuple(map(int, _chosen("--zero", self.zero, tuple(map(str, ZERO)))))
        for name in ("cp", "vpp"):
            if (text := getattr(self, name)) is not None:
                fields[name] = _degrees(f"--{name}", text)
        for name in ("expert_parallel", "sequence_parallel", "offload"):
            if getattr(self, name):
                fields[name] = True
        if self.even_shares:
            fields["uneven_shares"] = False
        return fields


def _chosen(flag: str, text: str, valid: Sequence[str]) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [part for part in parts if part not in valid]
    if unknown:
        raise SettingsError(f"{flag} {unknown[0]!r}, valid: {', '.join(valid)}")
    return tuple(sorted(parts, key=valid.index))


def _degrees(flag: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SettingsError(f"{flag} {text!r}: expected degrees of at least 1, joined by commas")
    return tuple(sorted({1, *map(int, parts)}))
