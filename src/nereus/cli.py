"""The verbs (the only typer). Each resolves the settings, calls one thing, prints it; errors become exit codes."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import MISSING, asdict, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.logging import RichHandler

from nereus import settings as build
from nereus.core import NereusError, SettingsError, codec, plugins
from nereus.cost.state import schemas
from nereus.planning.judge import Scored
from nereus.planning.search import search
from nereus.report import history, live, summary, tables, trace
from nereus.settings import Settings

EXTRA_MODULES = ("torch", "safetensors", "tokenizers", "transformers", "psutil")
SETTINGS = "settings.yaml"
"""The resolved settings of a run, in its directory."""

KINDS = {
    "algorithms": "nereus.algorithms",
    "families": "nereus.families",
    "tasks": "nereus.tasks",
    "clusters": "nereus.clusters",
    "admission": "nereus.controller.admission",
    "recorders": "nereus.report.recorders",
}

app = typer.Typer(
    name="nereus",
    help="Keeps an RL post-training job for LLMs on its best parallel layout while it runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
WIDTH = 120
"""Columns where the output is not a terminal."""

out = Console(soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
err = Console(soft_wrap=True, stderr=True)

JobFile = Annotated[Path, typer.Argument(help="The YAML file of the job.", metavar="JOB")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as run.steps=10.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point of the `nereus` command."""
    handler = RichHandler(console=err, show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    sys.path.insert(0, os.getcwd())  # the user's own plugins are found where the command is given
    try:
        app()
    except NereusError as error:
        err.print(f"nereus: {error}", markup=False, highlight=False, style="red")
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a directory that has gone
        err.print(f"nereus: {error}", markup=False, highlight=False, style="red")
        sys.exit(1)


@app.command()
def check(job: JobFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Validate a job and print its settings, every default filled in."""
    settings = build.resolve(job, overrides or ())
    found = validate(settings)
    resolved = settings.model_dump(mode="json", exclude_none=True)
    if as_json:
        echo_json({"settings": resolved, "plan": found.plan.describe()})
        return
    out.print(as_yaml(resolved), markup=False, highlight=False, end="")
    out.print(f"# valid; it starts with {found.plan.describe()}", markup=False, highlight=False)


@app.command()
def plan(
    job: JobFile,
    overrides: Overrides = None,
    devices: Annotated[int | None, typer.Option(help="Plan for the first N devices instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the fastest plan that fits, what limits it, the runners-up, and what was refused."""
    settings = build.resolve(job, overrides or ())
    problem = build.problem(settings, devices)
    found = search(problem)
    if as_json:
        best, *rest = (codec.encode(scored) for scored in found.best)
        echo_json({**best, "runners_up": rest, "refused": tables.grouped(found.refused)})
    else:
        out.print(tables.plan(problem, found))


@app.command()
def train(
    job: Annotated[
        Path | None, typer.Argument(help="The YAML file; with --resume the run's own.", metavar="JOB")
    ] = None,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is recorded.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue the run in this directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train, adapting the layout while it runs. Ctrl-C ends with a checkpoint."""
    if job is None and resume is None:
        raise SettingsError("train needs a JOB file, or --resume RUN")
    settings = build.resolve(job or Path(str(resume)) / SETTINGS, overrides or ())
    validate(settings)
    # By an exception, so that all is cleaned up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    config, source = build.job_config(settings), build.cluster_source(settings)
    trainer, checkpoint = (import_trainer(f"nereus.trainer.{name}") for name in ("run", "checkpoint"))
    began = 0
    if resume is not None:
        stored = checkpoint.latest(resume)
        checkpoint.check(stored, schemas(build.workflow(settings)), settings.run.seed)
        began = checkpoint.read_manifest(stored).step
        if began >= settings.run.steps:
            raise SettingsError(
                f"{resume} is at step {began}, run.steps is {settings.run.steps}: --set run.steps to more"
            )
    directory = run_dir or resume or fresh(Path(settings.run.directory))
    if run_dir is not None and recorded(run_dir) and (resume is None or run_dir.resolve() != resume.resolve()):
        raise SettingsError(f"{directory} already holds a run: give another --run-dir, or --resume {directory}")
    resolved = as_yaml(settings.model_dump(mode="json", exclude_none=True))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if recorded(directory):
            (directory / SETTINGS).rename(directory / f"settings-until-{began}.yaml")
        (directory / SETTINGS).write_text(resolved)
    except OSError as error:
        raise SettingsError(f"run directory {directory}: cannot be written: {error.strerror}") from None
    past = history.History()
    recorders = [*build.recorders(settings, directory), past]
    rule, thresholds = build.admission_rule(settings), build.thresholds(settings)
    with live.Live(err if as_json else out, settings.run.steps) as view:
        finished = trainer.train(config, source, rule, thresholds, [*recorders, view], directory, resume)
    trace.write(directory / (f"trace-from-{began}.json" if began else "trace.json"), past, build.workflow(settings))
    report = summary.summarise(past)
    if as_json:
        echo_json({**asdict(report), **asdict(finished), "directory": directory})
        return
    out.print(summary.render(report))
    out.print(f"checkpoint: {finished.checkpoint}\nactor: {finished.exported}", markup=False, highlight=False)
    if finished.stopped:
        out.print(
            f"stopped by the user at step {finished.step}; resume with: nereus train --resume {directory}", markup=False
        )


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


def validate(settings: Settings) -> Scored:
    """Everything that can be wrong with a job, found without starting or writing anything."""
    build.admission_rule(settings)
    build.thresholds(settings)
    build.recorders(settings, Path(settings.run.directory))
    if build.trainable(settings):
        build.job_config(settings)
    return search(build.problem(settings), 1).best[0]


def import_trainer(name: str) -> ModuleType:
    """A module that needs torch. Raises SettingsError with the remedy when it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA_MODULES:
            raise
        raise SettingsError(f"training needs {error.name}: pip install 'nereus[train]'") from None


def recorded(directory: Path) -> bool:
    """Whether a run has been recorded in a directory."""
    return (directory / SETTINGS).exists()


def fresh(directory: Path) -> Path:
    """The directory, or NAME-2, NAME-3, ... when runs have been recorded there."""
    number, candidate = 1, directory
    while recorded(candidate):
        number += 1
        candidate = directory.with_name(f"{directory.name}-{number}")
    return candidate


def first_line(module: str) -> str:
    """What a module says of itself."""
    return (import_module(module).__doc__ or "").strip().partition("\n")[0]


def as_yaml(data: Any) -> str:
    """YAML in the order of the schema."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def echo_json(data: Any) -> None:
    """Print one JSON value on stdout."""
    typer.echo(json.dumps(data, indent=2, default=str))
