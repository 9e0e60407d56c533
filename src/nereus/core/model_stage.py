"""A model-stage: one model (a role) in one stage of the RL step (paper §1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nereus.core.errors import SettingsError


class Stage(StrEnum):
    """The three stages of an RL step, in the order that breaks ties between transitions (paper §6.1)."""

    GENERATION = "generation"
    INFERENCE = "inference"
    TRAINING = "training"

    __hash__ = str.__hash__

    @property
    def order(self) -> int:
        """Position in generation → inference → training order."""
        return _ORDER[self]


_ORDER = {stage: index for index, stage in enumerate(Stage)}
MODELS = ("actor", "critic", "reward", "reference")


@dataclass(frozen=True, slots=True)
class ModelStage:
    """One model in one stage; prints as `actor/training`."""

    model: str
    stage: Stage

    def __str__(self) -> str:
        return f"{self.model}/{self.stage.value}"

    @property
    def sort_key(self) -> tuple[int, str]:
        """Stage order first, then the model's name."""
        return (self.stage.order, self.model)

    @classmethod
    def parse(cls, text: str) -> ModelStage:
        """Read `actor/training`. Raises SettingsError for an unknown stage or a missing slash."""
        model, slash, stage = text.partition("/")
        if not slash or not model or stage not in tuple(Stage):
            valid = ", ".join(Stage)
            raise SettingsError(f"model-stage {text!r}: expected MODEL/STAGE with STAGE one of {valid}")
        return cls(model, Stage(stage))
