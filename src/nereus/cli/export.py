"""`nereus export`: a plan in another framework's words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nereus.cli._app import AsJson, app, echo_json, err, out
from nereus.integrations import export as written
from nereus.report import plan_json


@app.command()
def export(
    framework: Annotated[str, typer.Argument(help=f"One of {', '.join(written.FRAMEWORKS)}.")],
    plan: Annotated[Path, typer.Argument(help="What `nereus plan --json` printed.", metavar="PLAN")],
    as_json: AsJson = False,
) -> None:
    """Print the overrides that realise a plan, checked against the framework's own schema where it is installed."""
    saved = plan_json.read(plan)
    lines = written.overrides(framework, saved.plan, saved.workflow, saved.workload, saved.cluster)
    unknown = written.unknown_keys(framework, lines)
    if as_json:
        echo_json(
            {"framework": framework, "overrides": lines, "checked": unknown is not None, "unknown": unknown or ()}
        )
        return
    for line in lines:
        out.print(line, markup=False, highlight=False)
    if unknown is None:
        err.print(f"{framework} is not installed here: its keys were not checked", markup=False, highlight=False)
    elif unknown:
        err.print(f"the {framework} installed here does not know {', '.join(unknown)}", markup=False, highlight=False)
