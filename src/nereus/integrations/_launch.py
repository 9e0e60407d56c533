"""The formats a launch configuration comes in, flattened to one mapping of dotted keys (or flags) to values.

Shell script, YAML, JSON of overrides, or lines of `key=value` and `--flag value`. Values stay as they are written;
`_keys` gives them types.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nereus.integrations.imported import Refusal, RefusedImportError
from nereus.integrations.shell import Command, Script, ShellSyntaxError, interpret

OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.-]*)(=(.*))?", re.DOTALL)
ARRAY = re.compile(r"\$\{\w+\[[@*]\]")
SHELL_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch")
WRAPPERS = ("overrides", "config")
"""Keys under which a record of a configuration, with its source beside it, may hold the configuration itself."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value as written, the line it comes from (0: unknown)."""

    raw: Any
    line: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """A flattened configuration. `words` are the launch command's words that are neither keys nor flags."""

    name: str
    values: Mapping[str, Value]
    words: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Files that are sourced, inherited or expanded into arguments and are not there."""
    undecided: Mapping[str, int] = field(default_factory=dict)
    """Variables that a condition decides which cannot be known, and its line."""
    notes: tuple[str, ...] = ()
    """How what is not as the shell has it was understood."""


def load(path: Path, roots: Collection[str], given: Mapping[str, str]) -> Launch:
    """The configuration in a file. `roots` are first parts of the framework's keys, or its flags.

    Raises RefusedImportError when it cannot be read or has none of them.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedImportError(Refusal.UNREADABLE, f"{path}: cannot be read: {error}") from None
    return parse(text, str(path), roots, given, path.parent)


def parse(text: str, name: str, roots: Collection[str], given: Mapping[str, str], folder: Path | None = None) -> Launch:
    """`load` of a text; files it refers to are looked for in `folder`."""
    ending = Path(name).suffix.lower()
    if ending in SHELL_ENDINGS or text.startswith("#!"):
        launch = _shell(text, name, roots, given, folder)
    elif ending == ".json" or text.lstrip().startswith("{"):
        launch = Launch(name, _flat(_unwrapped(_json(text, name), roots)))
    elif lines := _lines(text):
        launch = Launch(name, lines)
    elif ending in (".yaml", ".yml"):
        launch = _yaml(text, name, roots, folder)
    elif re.search(r"(^|\s)(python3?|ray|torchrun|bash)\s", text):
        launch = _shell(text, name, roots, given, folder)
    else:
        launch = _yaml(text, name, roots, folder)
    if not any(known(key, roots) for key in launch.values):
        raise RefusedImportError(
            Refusal.FOREIGN, f"{name}: none of its keys is one of the framework's, which start with {_some(roots)}"
        )
    return launch


def known(key: str, roots: Collection[str]) -> bool:
    """Whether a key belongs to a framework: its first part, or the whole flag, is listed."""
    return key in roots or key.partition(".")[0] in roots


def _some(roots: Collection[str]) -> str:
    return ", ".join(sorted(roots)[:8])


def _shell(text: str, name: str, roots: Collection[str], given: Mapping[str, str], folder: Path | None) -> Launch:
    def source(path: str) -> str | None:
        return _beside(path, folder)

    try:
        script = interpret(text, {**_slurm(text), **given}, source)
    except ShellSyntaxError as error:
        raise RefusedImportError(Refusal.UNREADABLE, f"{name} line {error.line}: {error}") from None
    command, notes = _launch_command(script, roots)
    values, rest = _arguments(command)
    symbols = [word for word in rest if word.startswith("${")]
    return Launch(name, values, tuple(rest), (*script.missing, *symbols), script.undecided, notes)


def _slurm(text: str) -> dict[str, str]:
    """Variables that a batch system sets as the script's own `#SBATCH` lines ask for nodes and GPUs."""
    asked = {
        ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"): r"(?:--nodes[= ]|-N ?)(\d+)",
        ("SLURM_GPUS_PER_NODE",): r"--gpus-per-node[= ](?:\w+:)?(\d+)",
    }
    found: dict[str, str] = {}
    for names, pattern in asked.items():
        if match := re.search(rf"^#SBATCH\s+{pattern}\s*(?:#.*)?$", text, re.MULTILINE):
            found |= dict.fromkeys(names, match[1])
    return found


def _launch_command(script: Script, roots: Collection[str]) -> tuple[Command, tuple[str, ...]]:
    """The command with most of the framework's keys, the first of equals. One that starts with a flag is the rest of
    the command before it, which is noted."""
    best = before = Command((), 0)
    most = 0
    notes: tuple[str, ...] = ()
    best_notes = notes
    for command in script.commands:
        if before.words and command.words and FLAG.fullmatch(command.words[0]):
            notes = (*notes, f"line {command.line} goes on with flags: the line before it is taken to end with \\")
            command = Command((*before.words, *command.words), before.line)
        else:
            notes = ()
        before = command
        count = sum(known(key, roots) for key in _arguments(command)[0])
        if count > most:
            best, most, best_notes = command, count, notes
    return best, best_notes


def _arguments(command: Command) -> tuple[dict[str, Value], list[str]]:
    """Keys and flags of a command line, and its other words. A flag followed by no value is True."""
    values: dict[str, Value] = {}
    rest: list[str] = []
    words = list(command.words)
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if flag := FLAG.fullmatch(word):
            name, given, value = flag.groups()
            if given is None and index < len(words) and _is_value(words[index]):
                value = words[index]
                index += 1
            values[f"--{name}"] = Value(True if value is None else value, command.line)
        elif override := OVERRIDE.fullmatch(word):
            values[override.group(1)] = Value(_unquoted(override.group(2)), command.line)
        else:
            rest.append(word)
    return values, rest


def _is_value(word: str) -> bool:
    """Whether a word can follow a flag as its value: no other flag, and no array of unknown words."""
    return not word.startswith("--") and not ARRAY.match(word)


def _unquoted(text: str) -> str:
    """Hydra's own quotes, which reach it through the shell's."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _beside(path: str, folder: Path | None) -> str | None:
    """A file named by a script: what follows the last unknown directory of its path, from the script's folder."""
    if folder is None:
        return None
    tail = re.split(r"[})`]/?", path)[-1].lstrip("/") if "$" in path or "`" in path else path
    for candidate in (Path(path), folder / tail, folder / Path(tail).name):
        try:
            if tail and candidate.is_file():
                return candidate.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError):
            continue
    return None


def _lines(text: str) -> dict[str, Value]:
    """`key=value` and `--flag value ...` lines; empty when any line is neither."""
    found: dict[str, Value] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip().removesuffix("\\").strip()
        if not bare or bare.startswith("#"):
            continue
        try:
            words = shlex.split(bare)
        except ValueError:
            return {}
        values, rest = _arguments(Command(tuple(words), number))
        if not values or (rest and not bare.startswith("--")):
            return {}
        found |= values
    return found


def _json(text: str, name: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RefusedImportError(Refusal.UNREADABLE, f"{name} line {error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise RefusedImportError(Refusal.UNREADABLE, f"{name}: not JSON: nested too deep") from None
    if isinstance(data, list):
        return {key: value.raw for key, value in _listed(data).items()}
    if not isinstance(data, dict):
        raise RefusedImportError(Refusal.UNREADABLE, f"{name}: expected an object of keys, or a list of overrides")
    return data


def _listed(items: Sequence[Any]) -> dict[str, Value]:
    """A list of `key=value` texts."""
    return _arguments(Command(tuple(str(item) for item in items), 0))[0]


def _yaml(text: str, name: str, roots: Collection[str], folder: Path | None) -> Launch:
    missing: list[str] = []
    data = _inherited(_yaml_data(text, name), folder, missing, name)
    lines = _key_lines(text)
    flat = _flat(_unwrapped(data, roots))
    values = {key: Value(value.raw, lines.get(key, 0)) for key, value in flat.items()}
    return Launch(name, values, missing=tuple(missing))


def _yaml_data(text: str, name: str) -> Mapping[str, Any]:
    try:
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RefusedImportError(Refusal.UNREADABLE, f"{name} line {line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise RefusedImportError(Refusal.UNREADABLE, f"{name}: not YAML: {error}") from None
    if isinstance(data, list):
        return {key: value.raw for key, value in _listed(data).items()}
    if not isinstance(data, dict):
        raise RefusedImportError(
            Refusal.UNREADABLE, f"{name}: neither a mapping of keys nor lines of key=value or --flag value"
        )
    return data


def _inherited(
    data: Mapping[str, Any], folder: Path | None, missing: list[str], name: str, depth: int = 0
) -> dict[str, Any]:
    """A configuration on top of the files that its `defaults` names; those that are not there are noted."""
    own = {key: value for key, value in data.items() if key != "defaults"}
    named = data.get("defaults")
    merged: dict[str, Any] = {}
    for entry in [named] if isinstance(named, str) else named if isinstance(named, list) else []:
        if not isinstance(entry, str) or entry == "_self_" or "@" in entry:
            continue
        text = _beside(entry, folder) or _beside(f"{entry}.yaml", folder)
        if text is None or folder is None or depth > 10:
            missing.append(entry)
        else:
            file = folder / entry
            inner = _inherited(_yaml_data(text, str(file)), file.parent, missing, name, depth + 1)
            merged = _merged(merged, inner)
    return _merged(merged, own)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _unwrapped(data: Mapping[str, Any], roots: Collection[str]) -> Mapping[str, Any]:
    if any(known(str(key), roots) for key in data):
        return data
    return next((data[key] for key in WRAPPERS if isinstance(data.get(key), dict)), data)


def _flat(data: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Value]:
    """Nested mappings as dotted keys; lists stay whole."""
    found: dict[str, Value] = {}
    for key, value in data.items():
        path = f"{prefix}{str(key).lstrip('+')}"
        if isinstance(value, dict) and value and depth < 50:
            found |= _flat(value, f"{path}.", depth + 1)
        else:
            found[path] = Value(value)
    return found


def _key_lines(text: str) -> dict[str, int]:
    """The line of every key of a YAML text."""
    node = yaml.compose(text, yaml.SafeLoader)
    return dict(_node_lines(node, "", 0)) if node is not None else {}


def _node_lines(node: yaml.Node, prefix: str, depth: int) -> Iterator[tuple[str, int]]:
    pairs: Iterable[tuple[yaml.Node, yaml.Node]] = node.value if isinstance(node, yaml.MappingNode) else ()
    for key, value in pairs:
        path = f"{prefix}{key.value}"
        yield path, key.start_mark.line + 1
        if depth < 50:
            yield from _node_lines(value, f"{path}.", depth + 1)
