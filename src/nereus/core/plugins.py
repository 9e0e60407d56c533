"""Find a plugin by the name of its file; its class is the CamelCase of that name (no registry)."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from nereus.core.errors import SettingsError


def names(package: str) -> tuple[str, ...]:
    """The plugins in a package: its modules that do not start with an underscore."""
    path = import_module(package).__path__
    return tuple(sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_") and not m.ispkg))


def load(package: str, name: str) -> Any:
    """The class or function behind `name`: a file of `package`, or a dotted name of the user's own.

    Raises SettingsError naming the valid choices.
    """
    if "." in name:
        return dotted(name)
    if name not in names(package):
        valid = names(package)
        near = difflib.get_close_matches(name, valid, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"{package.rpartition('.')[2]} {name!r} is unknown, valid: {', '.join(valid)}{hint}")
    return getattr(import_module(f"{package}.{name}"), camel(name))


def make(package: str, name: str, options: Mapping[str, Any]) -> Any:
    """An instance of a plugin with its options. Raises SettingsError for an unknown option."""
    plugin = load(package, name)
    if is_dataclass(plugin):
        valid = [field.name for field in fields(plugin) if field.init]
        for key in options:
            if key not in valid:
                near = difflib.get_close_matches(key, valid, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise SettingsError(f"{name}: unknown option {key!r}, valid: {', '.join(valid) or 'none'}{hint}")
    try:
        return plugin(**options)
    except TypeError as error:
        raise SettingsError(f"{name}: {error}") from None


def dotted(name: str) -> Any:
    """The object at `package.module.attribute`. Raises SettingsError when it cannot be imported."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two of a name like `..x`
        raise SettingsError(f"cannot load {name!r}: {error}") from None


def camel(name: str) -> str:
    """`every_n` → `EveryN`."""
    return "".join(part.capitalize() for part in name.split("_"))
