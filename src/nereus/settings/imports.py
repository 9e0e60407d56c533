"""A planning question that another framework's launch configuration asks."""

from __future__ import annotations

from pathlib import Path

from nereus.core import SettingsError
from nereus.settings.flags import Flags
from nereus.settings.question import Question

FRAMEWORKS = ("verl", "openrlhf", "nemo-rl", "slime", "roll", "areal")


def question(framework: str, path: Path, flags: Flags) -> Question:  # noqa: ARG001
    """The question of a configuration; flags say what it leaves open, such as the machines."""
    raise SettingsError(f"--from {framework} {path}: not supported yet")
