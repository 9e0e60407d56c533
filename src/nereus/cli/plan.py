"""`nereus plan`: the fastest layout of a job, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from nereus import settings as build
from nereus.cli._app import AsJson, JobFile, Overrides, app, echo_json, out
from nereus.core import codec
from nereus.planning.search import search
from nereus.report import tables


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
