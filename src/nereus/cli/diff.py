"""`nereus diff`: what leads from one plan to another, how long it takes and what it moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nereus.cli._app import AsJson, Overrides, app, echo_json, out, save
from nereus.core import SettingsError
from nereus.core.plan import numbers
from nereus.core.sizes import size_bytes
from nereus.report import diff_page, diff_tree, trace
from nereus.report.diff import Asked
from nereus.report.diff import diff as between
from nereus.settings import two_plans


@app.command()
def diff(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Two plans, as plan --json prints or a run records them; or one run.", metavar="A B|RUN"),
    ],
    steps: Annotated[
        tuple[int, int] | None, typer.Option(help="Of RUN: the plans these two steps ran under.", metavar="FROM TO")
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="The job's YAML, when the plans do not say it.", metavar="JOB")
    ] = None,
    overrides: Overrides = None,
    lost: Annotated[str, typer.Option(help="Devices that are gone, such as 4,8-15.", metavar="DEVICES")] = "",
    across: Annotated[
        bool, typer.Option("--across-nodes", help="Positions of one node may be torn apart, to move less.")
    ] = False,
    host_memory: Annotated[
        str, typer.Option(help="Host memory of each node to stage units in where nothing else fits.", metavar="SIZE")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="One line for each primitive.")] = False,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace for Perfetto.", metavar="FILE")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a Gantt chart.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the transition from plan A to plan B: its primitives, seconds, bytes and memory."""
    _check_apart(paths, {"--job": job, "--trace": trace_file, "--html": html})
    asked = ask(paths, steps, job, overrides or (), lost)
    host_bytes = size_bytes(host_memory, "--host-memory") if host_memory else None
    found = between(replace(asked, across=across, host_bytes=host_bytes))
    if trace_file is not None:
        save("--trace", trace_file, trace.planned(found))
    if html is not None:
        save("--html", html, diff_page.page(found))
    if as_json:
        echo_json(found.described())
    else:
        out.print(diff_tree.render(found, every))


def ask(
    paths: list[Path], steps: tuple[int, int] | None, job: Path | None, overrides: list[str] | tuple[()], lost: str
) -> Asked:
    """The two plans and their job. Raises SettingsError for a question that is none."""
    gone = devices(lost)
    if overrides and job is None:
        raise SettingsError("--set changes a job file: it goes with --job")
    if steps is not None:
        if len(paths) != 1 or job is not None:
            raise SettingsError("--steps goes with one RUN, which says what its job is")
        return two_plans.of_run(paths[0], steps, gone)
    if len(paths) != 2:
        raise SettingsError(f"diff needs two plans A and B, or one RUN and --steps FROM TO; {len(paths)} given")
    return two_plans.of_files(paths[0], paths[1], job, overrides, gone)


def _check_apart(plans: list[Path], options: Mapping[str, Path | None]) -> None:
    """Raise SettingsError when a file would be written over another one that is read or written."""
    names = {path.resolve(): "the plan" for path in plans}
    for flag, path in options.items():
        if path is not None:
            other = names.setdefault(path.resolve(), flag)
            if other != flag and (path.is_file() or not path.exists()):  # nothing is lost on a device
                raise SettingsError(f"{flag} {path}: that is {other} as well, name another file")


def devices(text: str) -> frozenset[int]:
    """Of `4, 8-15`. Raises SettingsError."""
    try:
        return frozenset(numbers(text))
    except ValueError as error:
        raise SettingsError(f"--lost {text!r}: {error}; expected device numbers and ranges such as 4,8-15") from None
