"""`nereus check`: what is wrong with a job, found without starting or writing anything."""

from __future__ import annotations

from pathlib import Path

from nereus import settings as build
from nereus.cli._app import AsJson, JobFile, Overrides, app, as_yaml, echo_json, out
from nereus.planning.judge import Scored
from nereus.planning.search import search
from nereus.settings import Settings


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


def validate(settings: Settings) -> Scored:
    """Everything that can be wrong with a job, found without starting or writing anything."""
    build.admission_rule(settings)
    build.thresholds(settings)
    build.recorders(settings, Path(settings.run.directory))
    if build.trainable(settings):
        build.job_config(settings)
    return search(build.problem(settings), 1).best[0]
