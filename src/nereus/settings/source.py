"""From a file and overrides to `Settings`: YAML, `--set`, relative paths, errors that name the nearest valid key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nereus.core import SettingsError
from nereus.settings.schema import DIRECTORY, NAMED, SIZES, Settings

PATH_KEYS = ("path", "tokenizer")
"""Options that name a file or directory, in any section."""


def resolve(path: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a job: file, then overrides such as `plan.tp=[1, 2]`, then defaults.

    Paths in the file are relative to the file, paths in overrides to the current directory. Raises SettingsError.
    """
    file = Path(path)
    data = _absolute(_read(file), file.resolve().parent)
    for override in overrides:
        _override(data, override)
    data = _absolute(data, Path.cwd())
    run = data.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("directory", f"runs/{file.stem}")
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        # A mistyped key is also a missing one: the message is about what was typed.
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        raise SettingsError(f"{file}: {_explain(first)}") from None


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads `1e-5` as a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} appears twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        if node is not None and node.end_mark is None:  # an alias to what is still being read
            raise yaml.composer.ComposerError(None, None, "an alias stands inside what it refers to", node.start_mark)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _load(text: str, what: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise SettingsError(f"{what}: not YAML: {error}") from None
    except RecursionError:
        raise SettingsError(f"{what}: not YAML of a job: nested too deep") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: cannot be read: {error}") from None
    data = _load(text, str(file))
    if not isinstance(data, dict):
        raise SettingsError(f"{file}: expected a mapping with the keys {', '.join(Settings.model_fields)}")
    return data


def _absolute(node: Any, base: Path, key: str = "") -> Any:
    """A copy with every path made absolute: options named in PATH_KEYS, and models given as text."""
    if isinstance(node, dict):
        return {
            name: str(base / value)
            if isinstance(value, str) and (name in PATH_KEYS or key == "models")
            else _absolute(value, base, str(name))
            for name, value in node.items()
        }
    if isinstance(node, list):
        return [_absolute(item, base) for item in node]
    return node


def _override(data: dict[str, Any], text: str) -> None:
    """Set one key in place; sections on the way are made. Unknown keys are refused by the schema afterwards."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SettingsError(f"--set {text!r}: expected KEY.KEY=VALUE, such as run.steps=10")
    node: Any = data
    for depth, key in enumerate(keys[:-1], start=1):
        node = _item(node, key, text) if isinstance(node, list) else node.setdefault(key, {})
        if not isinstance(node, dict | list):
            raise SettingsError(f"--set {text!r}: {'.'.join(keys[:depth])} is {node!r}, it has no keys")
    last = keys[-1]
    if isinstance(node, list):
        _item(node, last, text)
        node[int(last)] = _load(value, f"--set {path}")
    else:
        node[last] = _load(value, f"--set {path}")


def _item(items: list[Any], key: str, text: str) -> Any:
    if not key.isdecimal() or int(key) >= len(items):
        raise SettingsError(f"--set {text!r}: {key!r} is not an index of a list of {len(items)}")
    return items[int(key)]


def _explain(error: ErrorDetails) -> str:
    """One sentence for a pydantic error."""
    parts = [str(part) for part in error["loc"]]
    if parts[0] == "models":  # what pydantic calls the two ways to give a model is no key
        parts = [part for part in parts if part not in (DIRECTORY, NAMED, SIZES)]
    where = ".".join(parts)
    if error["type"] == "extra_forbidden":
        return unknown_key(parts, _fields(Settings, parts[:-1]))
    if error["type"] == "missing":
        return f"{where} is missing"
    return f"{where} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def unknown_key(parts: Sequence[str], valid: Iterable[str]) -> str:
    """The message for a key that does not exist, with the nearest that does: in its own section, else anywhere."""
    key, section = parts[-1], ".".join(parts[:-1])
    siblings = list(valid)
    near = difflib.get_close_matches(key, siblings, 1)
    candidates = [".".join((*parts[:-1], near[0]))] if near else _elsewhere(key, ".".join(parts))
    hint = f"; did you mean {candidates[0]!r}?" if candidates else ""
    place = f"valid in {section}" if section else "valid at the top"
    return f"unknown key {'.'.join(parts)!r}{hint} ({place}: {', '.join(siblings) or 'none'})"


def _elsewhere(key: str, path: str) -> list[str]:
    paths = list(known_paths(Settings))
    leaves = {known.rpartition(".")[2]: known for known in reversed(paths)}
    near = difflib.get_close_matches(key, leaves, 1)
    return [leaves[near[0]]] if near else difflib.get_close_matches(path, paths, 1, cutoff=0.0)


def known_paths(section: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = _sections(field.annotation)
        if inner and get_origin(field.annotation) is not dict:
            yield from known_paths(inner[0], f"{prefix}{name}.")


def _fields(section: type[BaseModel], parts: Sequence[str]) -> list[str]:
    """The keys of the section at a path; a name inside a mapping of sections (`pin`) is part of the path."""
    rest = list(parts)
    while rest:
        annotation = section.model_fields[rest.pop(0)].annotation
        section = _sections(annotation)[0]
        if get_origin(annotation) in (dict, tuple):
            rest.pop(0)
    return list(section.model_fields)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The schema classes named in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _sections(argument)]
