"""One row of a key table: which keys fill a field, as what, and the framework's own default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from nereus.core.plan import RECOMPUTE
from nereus.integrations._keys import Keys
from nereus.integrations.imported import Part


@dataclass(frozen=True, slots=True)
class Entry:
    """`keys` in order of preference. `needed`: a value that stays open refuses the whole configuration."""

    kind: str
    keys: tuple[str, ...]
    default: Any = None
    needed: bool = False

    def read(self, keys: Keys, of: str) -> Any:
        """The value of field `of`."""
        match self.kind:
            case "integer":
                return keys.integer(*self.keys, default=self.default, of=of, needed=self.needed)
            case "number":
                return keys.number(*self.keys, default=self.default, of=of)
            case "flag":
                return keys.flag(*self.keys, default=self.default, of=of)
        found = keys.text(*self.keys, default=self.default, of=of)
        if self.kind == "recompute" and found not in (None, *RECOMPUTE):
            key = next(key for key in self.keys if keys.has(key))
            raise keys.invalid(key, f"is {found!r}, valid: {', '.join(RECOMPUTE)}")
        return found


Table: TypeAlias = dict[str, Entry]


def degree(*keys: str, default: int | None = None) -> Entry:
    """A degree, a count or a batch size: the answer depends on it."""
    return Entry("integer", keys, default, needed=True)


def size(*keys: str, default: int | None = None) -> Entry:
    """A whole number that the answer can do without."""
    return Entry("integer", keys, default)


def share(*keys: str, default: float | None = None) -> Entry:
    """A fraction."""
    return Entry("number", keys, default)


def switch(*keys: str, default: bool | None = None) -> Entry:
    """True or false."""
    return Entry("flag", keys, default)


def name(*keys: str, default: str | None = None) -> Entry:
    """A text."""
    return Entry("text", keys, default)


def recompute(*keys: str, default: str | None = None) -> Entry:
    """Megatron's granularity of recomputation."""
    return Entry("recompute", keys, default)


def fill(keys: Keys, table: Table, of: str) -> dict[str, Any]:
    """The fields of a table that have a value; `of` is the part that they belong to."""
    found = {field: entry.read(keys, f"{of}.{field}" if of else field) for field, entry in table.items()}
    return {field: value for field, value in found.items() if value is not None}


def part(keys: Keys, table: Table, of: str, **more: Any) -> Part:
    """The layout of a model-stage; degrees below 1 are refused, except shard sizes, where -1 means all devices."""
    values = more | fill(keys, table, of)
    for field in fields(Part):
        value = values.get(field.name)
        least = {"shard": -1, "zero": 0}.get(field.name, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value < least and field.name in table:
            key = next(key for key in table[field.name].keys if keys.has(key))
            raise keys.invalid(key, f"is {value}, must be at least {least}")
    return Part(**values)
