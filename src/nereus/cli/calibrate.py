"""`nereus calibrate`: measures this machine and writes it down as a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nereus.cli._app import AsJson, app, echo_json, import_extra, out
from nereus.core import SettingsError, codec


@app.command()
def calibrate(
    path: Annotated[Path, typer.Argument(help="The cluster file to write.", metavar="FILE")],
    devices: Annotated[int, typer.Option(help="Processes, one a device, between which links are measured.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's kernels, links and group set-up, and write a cluster file to plan with."""
    if devices < 1:
        raise SettingsError(f"--devices {devices}, must be at least 1")
    if not path.resolve().parent.is_dir():
        raise SettingsError(f"{path}: there is no directory {path.resolve().parent}")
    if path.is_dir():
        raise SettingsError(f"{path} is a directory, name the file to write")
    report: Any = import_extra("nereus.engine.calibrate", "calibration").calibrate(path, devices, quick)
    if as_json:
        echo_json(codec.encode(report))
    else:
        out.print(str(report), markup=False, highlight=False)
        out.print(f"plan with it: nereus plan ... --cluster {path}", markup=False, highlight=False)
