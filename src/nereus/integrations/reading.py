"""From a file to an `Imported`: find the format, flatten it to keys, hand the keys to the framework's table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nereus.integrations.imported import Imported

FRAMEWORKS = ("verl", "openrlhf", "nemo-rl", "slime", "roll", "areal")


def read(framework: str, path: str | Path, variables: Mapping[str, str] | None = None) -> Imported:
    """What the configuration in a file says. `variables` sets shell variables, or keys, that the file leaves open.

    Raises RefusedImportError, a SettingsError, with the line where that helps.
    """
    raise NotImplementedError


def read_text(framework: str, text: str, name: str, variables: Mapping[str, str] | None = None) -> Imported:
    """`read` of a text; `name` is what messages call it."""
    raise NotImplementedError
