"""Core values to and from plain JSON data, driven by their type annotations.

A union of dataclasses is written with the class name under `type`; mapping keys that are not strings are written as
text that their type can read back (`actor/training`, `3`).
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
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


def decode(kind: type[T] | Any, data: Any, at: str = "") -> T:
    """A value of type `kind` from what `encode` wrote; `at` is the key under which it stands.

    Raises SettingsError for data of another shape: where in the data, what stands there and what is expected.
    """
    try:
        result: T = _decode(kind, data, at)
    except _Mismatch as error:
        where = "".join(reversed(error.path)).removeprefix(".")
        name = getattr(kind, "__name__", kind)
        raise SettingsError(f"{where}: {error.text}" if where else f"cannot read {name}: {error.text}") from None
    return result


class _Mismatch(Exception):
    """Something stands where it cannot; `path` grows from there outwards."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path: list[str] = []


def _decode(kind: Any, data: Any, at: str = "") -> Any:
    """`at` is the last step of the way to `data`."""
    if type(data) is kind and (kind is not int or -MOST <= data <= MOST):  # most values are plain numbers
        return data
    try:
        return _value(kind, data)
    except _Mismatch as error:
        error.path.append(at)
        raise
    except SettingsError as error:
        mismatch = _Mismatch(str(error))
        mismatch.path.append(at)
        raise mismatch from None


def _value(kind: Any, data: Any) -> Any:
    if kind is Any or kind is None or kind is type(None):
        return data
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(args, data)
    if origin is not None:
        return _container(origin, args, data)
    if kind is ModelStage:
        return ModelStage.parse(_plain(str, data, "a model-stage such as actor/training"))
    if isinstance(kind, type) and is_dataclass(kind):
        return _record(kind, _plain(dict, data, f"an object with the fields of {kind.__name__}"))
    if issubclass(kind, Enum):
        if data not in tuple(member.value for member in kind):
            raise _Mismatch(f"{_shown(data)}, valid: {', '.join(str(member.value) for member in kind)}")
        return kind(data)
    if kind is float:
        return _number(data)
    return _plain(kind, data, WORDS.get(kind, kind.__name__))


WORDS = {int: "a whole number", bool: "true or false", str: "a text"}


def _plain(kind: type, data: Any, expected: str) -> Any:
    if type(data) is not kind:
        raise _Mismatch(f"{_shown(data)}, expected {expected}")
    if isinstance(data, int) and not -MOST <= data <= MOST:
        raise _Mismatch(f"{_shown(data)}, expected {expected} of at most {MOST:,}")
    return data


MOST = 2**63 - 1
"""What counts things is kept in 64 bits by whoever calculates with it."""


def _number(data: Any) -> float:
    if data in ("inf", "-inf") or (isinstance(data, int | float) and not isinstance(data, bool)):
        try:
            return float(data)
        except OverflowError:
            pass
    raise _Mismatch(f"{_shown(data)}, expected a number")


def _shown(data: Any) -> str:
    """A value as JSON has it, cut short."""
    text = json.dumps(data, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


SHOWN = 40


def _record(kind: type, data: Mapping[str, Any]) -> Any:
    actual = _subclass(kind, data.get("type"))
    hints, known = _hints(actual), _fields(actual)
    for key in data:
        if key != "type" and key not in known:
            valid = get_close_matches(key, known, 1) or known
            raise _Mismatch(f"{actual.__name__} has no field {_shown(key)}, valid: {', '.join(valid)}")
    if missing := [name for name, needed in known.items() if needed and name not in data]:
        raise _Mismatch(f"{actual.__name__} needs {', '.join(missing)}")
    return actual(**{key: _decode(hints[key], item, f".{key}") for key, item in data.items() if key != "type"})


def _union(args: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in args:
        return None
    members = [member for member in args if member is not type(None)]
    if isinstance(data, dict) and "type" in data:
        members = [member for member in members if getattr(member, "__name__", "") == data["type"]] or members
    return _value(members[0], data)


def _container(origin: Any, args: tuple[Any, ...], data: Any) -> Any:
    if issubclass(origin, Mapping):
        _plain(dict, data, "an object")
        return {_key(args[0], key): _decode(args[1], item, f".{key}") for key, item in data.items()}
    _plain(list, data, "a list")
    kinds = args[:1] * len(data) if len(args) == 1 or args[1] is Ellipsis else args
    if len(kinds) != len(data):
        raise _Mismatch(f"{_shown(data)}, expected a list of {len(kinds)}")
    found = (_decode(kind, item, f"[{at}]") for at, (kind, item) in enumerate(zip(kinds, data, strict=True)))
    return frozenset(found) if origin is frozenset else tuple(found)


def _key(kind: Any, text: str) -> Any:
    """Of a mapping: text that its type can read back."""
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise _Mismatch(f"{_shown(text)} is no key, expected a whole number") from None
    return _value(kind, text)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _fields(kind: type) -> dict[str, bool]:
    """Name → whether it has to be given."""
    return {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(kind) if f.init}


def _subclass(kind: type, name: str | None) -> type:
    if name is None or kind.__name__ == name:
        return kind
    # A slotted dataclass replaces the class it decorates, which may linger among the subclasses: the last one counts.
    children: list[type] = kind.__subclasses__()
    for child in reversed(children):
        if child.__name__ == name:
            return child
    raise _Mismatch(f"{_shown(name)} is not a kind of {kind.__name__}")
