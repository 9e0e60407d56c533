"""Core values to and from plain JSON data, driven by their type annotations.

A union of dataclasses is written with the class name under `type`; mapping keys that are not strings are written as
text that their type can read back (`actor/training`, `3`).
"""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from nereus.core.errors import SettingsError
from nereus.core.model_stage import ModelStage

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Plain JSON data for a core value."""
    if isinstance(value, ModelStage):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: encode(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"type": type(value).__name__} | given
    if isinstance(value, Mapping):
        return {str(encode(key)): encode(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(
            (encode(item) for item in value), key=str if any(isinstance(i, ModelStage) for i in value) else None
        )
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return value


def decode(kind: type[T] | Any, data: Any) -> T:
    """A value of type `kind` from what `encode` wrote. Raises SettingsError for data of another shape."""
    try:
        result: T = _decode(kind, data)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise SettingsError(f"cannot read {getattr(kind, '__name__', kind)}: {error!r}") from None
    return result


def _decode(kind: Any, data: Any) -> Any:
    if kind is Any or kind is None or kind is type(None):
        return data
    if kind is ModelStage:
        return ModelStage.parse(data)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(args, data)
    if origin is not None:
        return _container(origin, args, data)
    if isinstance(kind, type) and is_dataclass(kind):
        actual = _subclass(kind, data.get("type"))
        hints = _hints(actual)
        return actual(**{key: _decode(hints[key], item) for key, item in data.items() if key != "type"})
    if kind is float:
        return float(data)
    return kind(data)


def _union(args: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in args:
        return None
    members = [member for member in args if member is not type(None)]
    if isinstance(data, dict) and "type" in data:
        members = [member for member in members if getattr(member, "__name__", "") == data["type"]] or members
    return _decode(members[0], data)


def _container(origin: Any, args: tuple[Any, ...], data: Any) -> Any:
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode(args[0], item) for item in data)
        return tuple(_decode(arg, item) for arg, item in zip(args, data, strict=True))
    if origin is frozenset:
        return frozenset(_decode(args[0], item) for item in data)
    if issubclass(origin, Mapping):
        return {_decode(args[0], key): _decode(args[1], item) for key, item in data.items()}
    if issubclass(origin, Sequence | Collection):
        return tuple(_decode(args[0], item) for item in data)
    raise TypeError(f"no reader for {origin}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _subclass(kind: type, name: str | None) -> type:
    if name is None or kind.__name__ == name:
        return kind
    # A slotted dataclass replaces the class it decorates, which may linger among the subclasses: the last one counts.
    children: list[type] = kind.__subclasses__()
    for child in reversed(children):
        if child.__name__ == name:
            return child
    raise SettingsError(f"{name!r} is not a kind of {kind.__name__}")
