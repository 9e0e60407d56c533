"""`nereus list`: what can be plugged in."""

from __future__ import annotations

from dataclasses import MISSING, fields
from importlib import import_module
from typing import Annotated

import typer

from nereus.cli._app import AsJson, app, echo_json, out
from nereus.core import SettingsError, plugins

KINDS = {
    "algorithms": "nereus.algorithms",
    "families": "nereus.families",
    "tasks": "nereus.tasks",
    "clusters": "nereus.clusters",
    "admission": "nereus.controller.admission",
    "recorders": "nereus.report.recorders",
}


@app.command("list")
def list_plugins(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")], as_json: AsJson = False
) -> None:
    """List what can be plugged in and its options, from the files themselves."""
    if kind not in KINDS:
        raise SettingsError(f"list {kind!r}: valid: {', '.join(KINDS)}")
    package = KINDS[kind]
    found = {name: (first_line(f"{package}.{name}"), options(package, name)) for name in plugins.names(package)}
    if as_json:
        echo_json({name: {"about": about, "options": chosen} for name, (about, chosen) in found.items()})
        return
    for name, (about, chosen) in found.items():
        out.print(f"{name:<12} {about}", markup=False, highlight=False)
        for option, default in chosen.items():
            out.print(f"{'':<12}   {option}: {default}", markup=False, highlight=False)


def options(package: str, name: str) -> dict[str, str]:
    """The options of a plugin with their defaults."""
    fields_ = [field for field in fields(plugins.load(package, name)) if field.init and not field.name.startswith("_")]
    return {field.name: "required" if field.default is MISSING else str(field.default) for field in fields_}


def first_line(module: str) -> str:
    """What a module says of itself."""
    return (import_module(module).__doc__ or "").strip().partition("\n")[0]
