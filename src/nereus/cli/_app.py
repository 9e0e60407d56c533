"""The typer application, the two consoles, and what every verb shares (the only typer)."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
import yaml
from rich.console import Console

from nereus.core import SettingsError
from nereus.core.files import write_whole

T = TypeVar("T")

EXTRA_MODULES = ("torch", "safetensors", "tokenizers", "transformers", "psutil")
NUMBERS = re.compile(r"\[\s+(?:-?[\d.]+,\s+)*-?[\d.]+\s+\]")
WIDTH = 120
"""Columns where the output is not a terminal."""

if sys.stdout is None:  # closed by whoever started it: what is printed goes nowhere
    sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
if sys.stderr is None:
    sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")

app = typer.Typer(
    name="nereus",
    help="Keeps an RL post-training job for LLMs on its best parallel layout while it runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
err = Console(soft_wrap=True, stderr=True, width=None if sys.stderr.isatty() else WIDTH)

JobFile = Annotated[Path, typer.Argument(help="The YAML file of the job.", metavar="JOB")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as run.steps=10.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"nereus {version('nereus')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Keeps an RL post-training job for LLMs on its best parallel layout while it runs."""


def import_extra(name: str, what: str = "training") -> ModuleType:
    """A module that needs torch. Raises SettingsError with the remedy when it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA_MODULES:
            raise
        raise SettingsError(f"{what} needs {error.name}: pip install '.[train]'") from None


def as_yaml(data: Any) -> str:
    """YAML in the order of the schema."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=WIDTH)


def echo_json(data: Any) -> None:
    """Print one JSON value on stdout; lists of numbers, such as device ids, take one line each."""
    text = json.dumps(data, indent=2, default=str)
    typer.echo(NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text))


def options_of(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Makes a command of a function of one dataclass: its fields are the options, annotated as typer has them."""
    hints = get_type_hints(kind, include_extras=True)

    def made(function: Callable[[T], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            function(kind(**given))

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
            for field in fields(kind)  # type: ignore[arg-type]
        ]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return made


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Says on a terminal what is being done, until it is done; takes other words for it. Logs are spared."""
    with err.status(text) as status:
        yield status.update


def save(flag: str, path: Path, text: str) -> None:
    """Write a file that was asked for, whole or not at all. Raises SettingsError when it cannot be."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise SettingsError(f"{flag} {path}: cannot be written: {error.strerror}") from None
