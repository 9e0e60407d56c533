"""`nereus list`: what can be plugged in."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Annotated

import typer

from nereus.cli._app import AsJson, app, echo_json, out
from nereus.clusters import named
from nereus.core import SettingsError, plugins
from nereus.core.sizes import show_bytes
from nereus.cost.parameters import parameters
from nereus.families import models

KINDS = {
    "algorithms": "nereus.algorithms",
    "families": "nereus.families",
    "tasks": "nereus.tasks",
    "clusters": "nereus.clusters",
    "admission": "nereus.controller.admission",
    "recorders": "nereus.report.recorders",
}
MODELS = "models"
MACHINES = "clusters"


@app.command("list")
def list_plugins(
    kind: Annotated[str | None, typer.Argument(help=f"One of {MODELS}, {', '.join(KINDS)}.")] = None,
    as_json: AsJson = False,
) -> None:
    """List what can be named: models, machines, and what can be plugged in with its options."""
    if kind is None:
        raise SettingsError(f"list: of what? One of {', '.join((MODELS, *KINDS))}")
    if kind != MODELS and kind not in KINDS:
        near = difflib.get_close_matches(kind, (MODELS, *KINDS), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"list {kind!r}: valid: {', '.join((MODELS, *KINDS))}{hint}")
    found = known_models() if kind == MODELS else plugged_in(kind)
    if kind == MACHINES:
        found |= machines()
    if as_json:
        echo_json({name: {"about": about, "options": chosen} for name, (about, chosen) in found.items()})
        return
    width = max(map(len, found)) + 2
    for name, (about, chosen) in found.items():
        out.print(f"{name:<{width}}{about}", markup=False, highlight=False)
        for option, default in chosen.items():
            out.print(f"{'':<{width}}  {option}: {default}", markup=False, highlight=False)


Listed = dict[str, tuple[str, dict[str, str]]]
"""By name: what it is, and its options with their defaults."""


def plugged_in(kind: str) -> Listed:
    """The plugins of a folder, from the files themselves."""
    package = KINDS[kind]
    return {name: (first_line(f"{package}.{name}"), options(package, name)) for name in plugins.names(package)}


def known_models() -> Listed:
    """Models that a plan may name, with their sizes."""
    found: Listed = {}
    for name in models.names():
        spec = models.named(name)
        count = int(parameters(spec).total)
        about = f"{count / 1e9:.4g} billion parameters, {spec.layers} layers, hidden {spec.hidden}, {spec.family}"
        found[name] = (about + f", {spec.experts} experts" * bool(spec.experts), {})
    return found


def machines() -> Listed:
    """Machine types that a plan may name."""
    found: Listed = {}
    for name in named.names():
        cluster = named.machine(name)
        kind = cluster.kind(cluster.ids[0])
        rate = max(flops for dtype, flops in kind.peak_flops.items() if dtype in ("bf16", "fp16"))
        about = f"{len(cluster.ids)} devices of {show_bytes(kind.memory_bytes)}, {rate / 1e12:.0f} TFLOP/s bf16"
        error = kind.constants.get("uncertainty")
        known = f"scaled from measured machines, give or take {error:.0%}" if error else "times fitted to measurements"
        found[name] = (f"a machine: {about}, {kind.memory_bytes_per_s / 1e12:.3g} TB/s; {known}", {})
    return found


def options(package: str, name: str) -> dict[str, str]:
    """The options of a plugin with their defaults."""
    fields_ = [field for field in fields(plugins.load(package, name)) if field.init and not field.name.startswith("_")]
    return {field.name: "required" if field.default is MISSING else str(field.default) for field in fields_}


def first_line(module: str) -> str:
    """What a module says of itself."""
    return (import_module(module).__doc__ or "").strip().partition("\n")[0]
