"""Typed access to the keys of a configuration: references resolved, defaults noted, unknown variables named."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from nereus.integrations._launch import Launch, Value
from nereus.integrations.imported import Refusal, RefusedImportError
from nereus.integrations.shell.expand import SYMBOL, string

T = TypeVar("T")

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([A-Za-z_][\w.]*\.?[\w.]*)\s*(?:,\s*([^{}]*))?\}")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([^{}]*))?\}")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_EMPTY = ("", "null", "none", "~", "???")
REQUIRED = object()
"""In place of a default: the configuration is refused when the key is missing."""


class Keys:
    """The keys of one launch. What is asked for is remembered: defaults that were taken, variables left open."""

    def __init__(self, launch: Launch, given: Mapping[str, str]) -> None:
        self.launch, self.given = launch, dict(given)
        self.defaults: dict[str, str] = {}
        self.unresolved: dict[str, None] = {}
        self._values = {**launch.values, **{key: Value(raw) for key, raw in given.items()}}

    def has(self, *keys: str) -> bool:
        """Whether one of the keys has a value other than null."""
        return any(self._raw(key) is not None for key in keys)

    def starts(self, prefix: str) -> bool:
        """Whether any key starts so."""
        return any(key.startswith(prefix) for key in self._values)

    def runs(self, pattern: str) -> str | None:
        """The word of the launch command, or the module it names, that holds a pattern."""
        words = (*self.launch.words, str(self.value("--module")))
        return next((word for word in words if re.search(pattern, word)), None)

    def text(self, *keys: str, default: str | None = None, of: str = "", needed: bool = False) -> str | None:
        """The first of the keys that has a value, as text."""
        return self._typed(keys, str, "a text", default, of, needed)

    def integer(self, *keys: str, default: int | None = None, of: str = "", needed: bool = True) -> int | None:
        """As a whole number. `of` is the field it fills, under which a default that is taken is noted."""
        return self._typed(keys, _integer, "a whole number", default, of, needed)

    def number(self, *keys: str, default: float | None = None, of: str = "", needed: bool = False) -> float | None:
        """As a number."""
        return self._typed(keys, _number, "a number", default, of, needed)

    def flag(self, *keys: str, default: bool | None = None, of: str = "") -> bool | None:
        """As true or false."""
        return self._typed(keys, _flag, "true or false", default, of, needed=False)

    def value(self, *keys: str) -> Any:
        """As it is written, references resolved; None when missing."""
        return next((raw for key in keys if (raw := self._raw(key)) is not None), None)

    def where(self, key: str) -> str:
        """The file, the line where known, and the key, for messages."""
        value = self._values.get(key)
        line = f" line {value.line}" if value and value.line else ""
        return f"{self.launch.name}{line}: {key}"

    def invalid(self, key: str, message: str) -> RefusedImportError:
        """The refusal of a key's value."""
        return RefusedImportError(Refusal.INVALID, f"{self.where(key)} {message}")

    def _typed(
        self, keys: Collection[str], cast: Callable[[Any], T], kind: str, default: T | None, of: str, needed: bool
    ) -> T | None:
        for key in keys:
            raw = self._raw(key)
            if raw is None:
                continue
            if isinstance(raw, str) and "$" in raw and not (cast is str and _named(raw)):
                if needed:
                    raise self._open(key, raw)
                self.unresolved[f"{self.where(key)}={raw}"] = None
                return None
            try:
                return cast(_named(raw) if cast is str and isinstance(raw, str) else raw)
            except (ValueError, TypeError, OverflowError):
                raise self.invalid(key, f"is {raw!r}, must be {kind}") from None
        if default is not None and of:
            self.defaults[of] = f"{next(iter(keys))}={default}"
        return default

    def _open(self, key: str, raw: str) -> RefusedImportError:
        names = [match.group(1) for match in SYMBOL.finditer(raw) if match.group(1)]
        names = names or re.findall(r"\$\{?([A-Za-z_]\w*|[0-9])", raw)
        why = [
            f"{name} depends on the condition in line {self.launch.undecided[name]}"
            if name in self.launch.undecided
            else f"{name} is set by nothing in the file"
            for name in dict.fromkeys(names)
        ]
        remedy = f"give it as {names[0]}=VALUE or {key}=VALUE" if names else f"give it as {key}=VALUE"
        reason = "; ".join(why) or "it is what a command prints"
        return RefusedImportError(Refusal.UNRESOLVED, f"{self.where(key)} is {raw!r}: {reason}; {remedy}")

    def _raw(self, key: str, depth: int = 0) -> Any:
        """A value with shell variables, environment variables and references to other keys put in."""
        value = self._values.get(key)
        raw = value.raw if value else None
        if not isinstance(raw, str):
            return raw
        text = raw.strip()
        if "$" in text and depth < 20:
            text = self._resolved(text, depth)
        return None if text.lower() in _EMPTY else text

    def _resolved(self, text: str, depth: int) -> str:
        def environment(match: re.Match[str]) -> str:
            return self.given.get(match.group(1), match.group(2) or f"${{{match.group(1)}}}")

        def reference(match: re.Match[str]) -> str:
            key = match.group(1)
            if key in self._values:
                found = self._raw(key, depth + 1)
                return "" if found is None else str(found)
            return match.group(2).strip() if match.group(2) is not None else match.group()

        text = _REFERENCE.sub(reference, _ENVIRONMENT.sub(environment, text))
        return string(text, dict(self.given)) if "$" in text and _balanced(text) else text


def _balanced(text: str) -> bool:
    """Whether a value can be expanded as a word of a shell."""
    return all(text.count(a) == text.count(b) for a, b in ("()", "{}")) and not any(q in text for q in "'\"`\\")


def _named(raw: str) -> str:
    """A path without the directories that are unknown: `${HOME}/models/Qwen3-8B` names Qwen3-8B."""
    if "$" not in raw:
        return raw
    tail = re.split(r"[})`]", raw)[-1]
    return tail.strip("/") if tail.startswith("/") and len(tail) > 1 else ""


def _integer(raw: Any) -> int:
    if isinstance(raw, bool):
        raise ValueError(raw)
    number = float(str(raw).replace("_", ""))
    if number != int(number):
        raise ValueError(raw)
    return int(number)


def _number(raw: Any) -> float:
    if isinstance(raw, bool):
        raise ValueError(raw)
    return float(raw)


def _flag(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    text = str(raw).lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(raw)
