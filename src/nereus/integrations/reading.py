"""From a file to an `Imported`: find the format, flatten it to keys, hand the keys to the framework's table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

from nereus.core import SettingsError
from nereus.integrations import _launch
from nereus.integrations._keys import Keys
from nereus.integrations.imported import Imported

FRAMEWORKS = ("verl", "openrlhf", "nemo-rl", "slime", "roll", "areal")


def read(framework: str, path: str | Path, variables: Mapping[str, str] | None = None) -> Imported:
    """What the configuration in a file says. `variables` sets shell variables, or keys, that the file leaves open.

    Raises RefusedImportError, a SettingsError, with the line where that helps.
    """
    table, given = _table(framework), dict(variables or {})
    return _imported(table, _launch.load(Path(path), table.ROOTS, given), given)


def read_text(framework: str, text: str, name: str, variables: Mapping[str, str] | None = None) -> Imported:
    """`read` of a text; `name` is what messages call it, and its ending says the format."""
    table, given = _table(framework), dict(variables or {})
    return _imported(table, _launch.parse(text, name, table.ROOTS, given), given)


def _table(framework: str) -> ModuleType:
    if framework not in FRAMEWORKS:
        near = difflib.get_close_matches(framework, FRAMEWORKS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"framework {framework!r} is unknown, valid: {', '.join(FRAMEWORKS)}{hint}")
    return import_module(f"nereus.integrations.{framework.replace('-', '_')}.config")


def _imported(table: ModuleType, launch: _launch.Launch, given: Mapping[str, str]) -> Imported:
    keys = Keys(launch, given)
    found: Imported = table.imported(keys)
    missing = [f"{name} is not beside the file, what it sets is unknown" for name in launch.missing]
    return replace(
        found, defaults=keys.defaults, unresolved=tuple(keys.unresolved), notes=(*found.notes, *launch.notes, *missing)
    )
