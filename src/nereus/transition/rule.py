"""In what orders of the same groups differ."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Groups start in stage order, or the `longest_first`. A unit whose memory is waited for leaves as soon as there is
    another copy; if `patient`, not before it has been read once, where there is something to be read it for. One that
    makes room for its own model-stage leaves when another can be read at once; if `eager`, when another is there. Units
    that groups wait to read leave when nothing else can start and nothing runs; if `early`, while others still run. New
    replicas are read from units of the start before others; if `fresh`, from new ones, so that the old ones may leave.
    If `prudent`, units whose room could be needed are read last, and others stay until no group can lose what it reads.
    """

    longest_first: bool = False
    patient: bool = False
    eager: bool = False
    early: bool = False
    fresh: bool = False
    prudent: bool = False

    def like(self, other: Rule, minds: Set[str]) -> bool:
        """Whether it leads to the same order as `other`, to which only the fields `minds` have made a difference."""
        return all(getattr(self, name) == getattr(other, name) for name in minds)
