"""How far a run has come: what it has entered into its order, which devices are in use, what has made a difference."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereus.core import ModelStage
from nereus.transition.decompose import Build
from nereus.transition.holders import Part
from nereus.transition.room import Room, Step
from nereus.transition.rule import Rule
from nereus.transition.waiting import Waiting


@dataclass(slots=True, eq=False)
class Progress:
    """What a run and the units that leave in it share."""

    parts: dict[ModelStage, Part]
    room: Room
    rule: Rule
    waiting: Waiting
    order: list[Step] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    """id of a group → its step."""
    bits: list[int] = field(default_factory=list)
    """Devices of each group's goal units, a bit each."""
    busy: int = 0
    """Devices that take part in a group, a bit each."""
    minds: set[str] = field(default_factory=set)
    """Fields of the rule that have made a difference, or would have: a rule that differs in others goes alike."""

    def part(self, build: Build) -> Part:
        """The model-stage that a group builds."""
        return self.waiting.part(build)

    def started(self, build: Build) -> bool:
        """Whether a group has."""
        return id(build) in self.steps
