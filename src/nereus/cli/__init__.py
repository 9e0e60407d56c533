"""The verbs. Each resolves the settings, calls one thing, prints it; errors become exit codes."""

from __future__ import annotations

import logging
import os
import sys

from rich.logging import RichHandler

from nereus.cli import calibrate, check, diff, export, listing, plan, train
from nereus.cli._app import app, err
from nereus.core import NereusError

__all__ = ["app", "calibrate", "check", "diff", "export", "listing", "main", "plan", "train"]


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
