"""`nereus train`: the built-in trainer under the controller."""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nereus import settings as build
from nereus.cli._app import AsJson, Overrides, app, as_yaml, echo_json, err, import_extra, out
from nereus.cli.check import validate
from nereus.core import SettingsError
from nereus.cost.state import schemas
from nereus.report import history, live, summary, trace
from nereus.settings import Settings

SETTINGS = "settings.yaml"
"""The resolved settings of a run, in its directory."""


@app.command()
def train(
    job: Annotated[
        Path | None, typer.Argument(help="The YAML file; with --resume the run's own.", metavar="JOB")
    ] = None,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is recorded.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue the run in this directory.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the hashes of tensors after each transition and synchronisation.")
    ] = False,
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
    trainer, checkpoint = (import_extra(f"nereus.trainer.{name}") for name in ("run", "checkpoint"))
    began = 0 if resume is None else _resumed_at(resume, settings, checkpoint)
    directory = run_dir or resume or fresh(Path(settings.run.directory))
    if run_dir is not None and recorded(run_dir) and (resume is None or run_dir.resolve() != resume.resolve()):
        raise SettingsError(f"{directory} already holds a run: give another --run-dir, or --resume {directory}")
    _keep_settings(directory, settings, began)
    past = history.History()
    recorders = [*build.recorders(settings, directory), past]
    rule, thresholds = build.admission_rule(settings), build.thresholds(settings)
    with live.Live(err if as_json else out, settings.run.steps) as view:
        finished = trainer.train(config, source, rule, thresholds, [*recorders, view], directory, resume, verify)
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


def _resumed_at(run: Path, settings: Settings, checkpoint: Any) -> int:
    """The step a run has come to. Raises SettingsError when it cannot go on from there."""
    stored = checkpoint.latest(run)
    checkpoint.check(stored, schemas(build.workflow(settings)), settings.run.seed)
    began: int = checkpoint.read_manifest(stored).step
    if began >= settings.run.steps:
        raise SettingsError(f"{run} is at step {began}, run.steps is {settings.run.steps}: --set run.steps to more")
    return began


def _keep_settings(directory: Path, settings: Settings, began: int) -> None:
    """Write the resolved settings of a run; those it had until step `began` stay beside them."""
    resolved = as_yaml(settings.model_dump(mode="json", exclude_none=True))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if recorded(directory):
            (directory / SETTINGS).rename(directory / f"settings-until-{began}.yaml")
        (directory / SETTINGS).write_text(resolved)
    except OSError as error:
        raise SettingsError(f"run directory {directory}: cannot be written: {error.strerror}") from None


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
