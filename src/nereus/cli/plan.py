"""`nereus plan`: the best layout of a job, and why. The job is a file, flags, or another framework's configuration."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from nereus.cli._app import app, echo_json, err, options_of, out, save, waiting
from nereus.cli.plan_options import PlanOptions
from nereus.core import InfeasibleError, SettingsError
from nereus.report import plan_json, plan_page, tables
from nereus.report.answer import Answer
from nereus.report.answer import answer as plan_answer
from nereus.settings import flags as by_flags
from nereus.settings import imports, question
from nereus.settings.flags import Flags
from nereus.settings.host import Host
from nereus.settings.question import Question

MOST_PLANS = 32
"""The search is exact over so many plans at once; it takes longer the more there are."""


@app.command()
@options_of(PlanOptions)
def plan(asked: PlanOptions) -> None:
    """Print the fastest plan that fits, what limits it, the runners-up, what was refused, and what would help."""
    if not 1 <= asked.top <= MOST_PLANS:
        raise SettingsError(f"--top {asked.top}, must be at least 1 and at most {MOST_PLANS}")
    question = ask(asked)
    with waiting("searching for the fastest plan that fits") as tell:
        found = plan_answer(
            question.problem,
            own=question.own,
            unplaced=question.unplaced,
            widest=question.widest,
            top=asked.top,
            advise=asked.advice,
            tell=tell,
        )
    show(question, found, asked.html, asked.as_json)


def ask(asked: PlanOptions) -> Question:
    """The question, from the one place that asks it. Raises SettingsError when two do, or none."""
    host = Host(**{field.name: getattr(asked, field.name) for field in fields(Host)})
    flags = Flags(**{field.name: getattr(asked, field.name) for field in fields(Flags)})
    return _asked(asked, flags, host).able(**host.capabilities()).pinned(asked.pin or ())


def _asked(asked: PlanOptions, flags: Flags, host: Host) -> Question:
    """The question as it stands before flags change devices, host and pins."""
    file, framework, overrides = asked.job, asked.framework, tuple(asked.overrides or ())
    if overrides and (file is None or framework):
        raise SettingsError("--set changes a job file; here the flags say it")
    if asked.variables and framework is None:
        raise SettingsError("--var sets what another framework's file leaves open: it goes with --from")
    if asked.made_for is not None and file is not None:
        raise SettingsError(f"--for {asked.made_for}: {file} says what runs it; it is for planning by flags")
    if framework is not None:
        if file is None:
            raise SettingsError(f"--from {framework} needs the FILE to read")
        return imports.question(framework, file, flags, tuple(asked.variables or ())).on(asked.devices)
    if file is None:
        return by_flags.question(flags, host).on(asked.devices)
    if given := flags.given():
        raise SettingsError(f"{file} says what to plan: --{given[0]} is for planning without a job file; use --set")
    return question.of_job(file, overrides, asked.devices)


def show(asked: Question, found: Answer, html: Path | None, as_json: bool) -> None:
    """Print the answer; when nothing fits, that is the error and the rest goes to stderr beside it."""
    if html is not None:
        save("--html", html, plan_page.page(found, asked.name, asked.assumptions, asked.notes))
    if as_json:
        echo_json(plan_json.of(found, asked.name, asked.assumptions, asked.notes, asked.imported))
    elif found.best is not None:
        out.print(tables.answer(found, asked.assumptions, asked.notes))
    else:
        err.print(tables.answer(found, asked.assumptions, asked.notes))
    if found.best is None:
        raise InfeasibleError(found.shortage)
