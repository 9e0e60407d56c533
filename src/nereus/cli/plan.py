"""`nereus plan`: the best layout of a job, and why. The job is a file, flags, or another framework's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from nereus.cli._app import AsJson, Overrides, app, echo_json, err, out
from nereus.core import InfeasibleError, SettingsError
from nereus.report import plan_json, plan_page, tables
from nereus.report.answer import Answer
from nereus.report.answer import answer as plan_answer
from nereus.settings import flags as by_flags
from nereus.settings import imports, question
from nereus.settings.flags import Flags
from nereus.settings.host import Host
from nereus.settings.question import Question

JOB, WORK, HOST, SHOW = "Models and machines", "What a step handles", "What the host can do", "What is shown"

MOST_PLANS = 32
"""The search is exact over so many plans at once; it takes longer the more there are."""

JobFile = Annotated[Path | None, typer.Argument(help="A job's YAML, or with --from the configuration.", metavar="FILE")]
From = Annotated[
    str | None, typer.Option("--from", metavar="FRAMEWORK", help=f"FILE is of {', '.join(imports.FRAMEWORKS)}.")
]
Name = Annotated[str | None, typer.Option(metavar="NAME|DIR", rich_help_panel=JOB, help="See: nereus list models.")]
Whole = Annotated[int | None, typer.Option(metavar="N", rich_help_panel=WORK)]


def option(text: str, panel: str, metavar: str | None = None, name: str | None = None) -> typer.models.OptionInfo:
    """An option with its help."""
    made: typer.models.OptionInfo = typer.Option(
        *([name] if name else []), help=text, rich_help_panel=panel, metavar=metavar
    )
    return made


@app.command()
def plan(
    job: JobFile = None,
    overrides: Overrides = None,
    framework: From = None,
    variables: Annotated[
        list[str] | None, typer.Option("--var", metavar="NAME=VALUE", help="Set what FILE leaves open, with --from.")
    ] = None,
    model: Name = None,
    critic_model: Name = None,
    reward_model: Name = None,
    reference_model: Name = None,
    verifier: Annotated[bool, option("Rewards come without a model.", JOB, name="--verifier")] = False,
    precision: Annotated[str | None, option("bf16, fp16 or fp32.", JOB)] = None,
    cluster: Annotated[str | None, option("Machines by name (h200x8), or a cluster file.", JOB, "NAME|FILE")] = None,
    nodes: Annotated[int | None, option("How many machines.", JOB, "N")] = None,
    devices: Annotated[int | None, option("Plan for the first N devices instead.", JOB, "N")] = None,
    algorithm: Annotated[str | None, option("See: nereus list algorithms.", WORK, "NAME")] = None,
    prompt: Annotated[str | None, option("Prompt tokens.", WORK, "MEAN[:MAX]")] = None,
    response: Annotated[str | None, option("Response tokens.", WORK, "MEAN[:P95[:MAX]]")] = None,
    batch: Annotated[int | None, option("Prompts of a step.", WORK, "N")] = None,
    samples: Annotated[int | None, option("Responses of a prompt.", WORK, "N")] = None,
    mini_batch: Annotated[int | None, option("Sequences of an update.", WORK, "N")] = None,
    epochs: Annotated[int | None, option("Passes over the batch.", WORK, "N")] = None,
    asynchronous: Annotated[
        bool, option("Generation goes on beside training, from the weights before.", WORK, name="--asynchronous")
    ] = False,
    pin: Annotated[
        list[str] | None, option("Fix degrees, such as actor/training=tp4,pp2,dp8,mb1.", HOST, "MODEL/STAGE=...")
    ] = None,
    dp: Annotated[str | None, option("Replicas: any number, or powers of two.", HOST, "any|powers")] = None,
    recompute: Annotated[str | None, option("Of none, selective, full.", HOST, "MODE,...")] = None,
    zero: Annotated[str | None, option("ZeRO levels, of 0, 1, 2, 3.", HOST, "LEVEL,...")] = None,
    cp: Annotated[str | None, option("Context-parallel degrees.", HOST, "DEGREE,...")] = None,
    vpp: Annotated[str | None, option("Interleaved pipeline stages.", HOST, "DEGREE,...")] = None,
    expert_parallel: Annotated[
        bool, option("Experts may be spread over devices.", HOST, name="--expert-parallel")
    ] = False,
    sequence_parallel: Annotated[
        bool, option("Activations may be cut inside a TP group.", HOST, name="--sequence-parallel")
    ] = False,
    offload: Annotated[bool, option("Idle model-stages may wait in host memory.", HOST, name="--offload")] = False,
    even_shares: Annotated[
        bool, option("DP and micro-batch must divide the batch.", HOST, name="--even-shares")
    ] = False,
    top: Annotated[int, option("How many plans.", SHOW, "K")] = 8,
    advice: Annotated[bool, option("Look for what would help.", SHOW)] = True,
    html: Annotated[Path | None, option("Also write a page with pictures.", SHOW, "FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the fastest plan that fits, what limits it, the runners-up, what was refused, and what would help."""
    if not 1 <= top <= MOST_PLANS:
        raise SettingsError(f"--top {top}, must be at least 1 and at most {MOST_PLANS}")
    flags = Flags(
        algorithm=algorithm,
        model=model,
        cluster=cluster,
        nodes=nodes,
        prompt=prompt,
        response=response,
        critic_model=critic_model,
        reward_model=reward_model,
        reference_model=reference_model,
        verifier=verifier,
        precision=precision,
        batch=batch,
        samples=samples,
        mini_batch=mini_batch,
        epochs=epochs,
        asynchronous=asynchronous,
    )
    host = Host(
        dp=dp,
        recompute=recompute,
        zero=zero,
        cp=cp,
        vpp=vpp,
        expert_parallel=expert_parallel,
        sequence_parallel=sequence_parallel,
        offload=offload,
        even_shares=even_shares,
    )
    source = Source(job, framework, tuple(overrides or ()), tuple(variables or ()))
    asked = ask(source, flags, devices, host).able(**host.capabilities()).pinned(pin or ())
    found = plan_answer(
        asked.problem, own=asked.own, unplaced=asked.unplaced, widest=asked.widest, top=top, advise=advice
    )
    show(asked, found, html, as_json)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a job is written, if it is; `variables` set what another framework's file leaves open."""

    file: Path | None
    framework: str | None
    overrides: tuple[str, ...]
    variables: tuple[str, ...]


def ask(source: Source, flags: Flags, devices: int | None, host: Host = by_flags.ANY_HOST) -> Question:
    """The question, from the one place that asks it. Raises SettingsError when two do, or none."""
    file = source.file
    if source.overrides and (file is None or source.framework):
        raise SettingsError("--set changes a job file; here the flags say it")
    if source.variables and source.framework is None:
        raise SettingsError("--var sets what another framework's file leaves open: it goes with --from")
    if source.framework is not None:
        if file is None:
            raise SettingsError(f"--from {source.framework} needs the FILE to read")
        return imports.question(source.framework, file, flags, source.variables).on(devices)
    if file is None:
        return by_flags.question(flags, host).on(devices)
    if given := flags.given():
        raise SettingsError(f"{file} says what to plan: --{given[0]} is for planning without a job file; use --set")
    return question.of_job(file, source.overrides, devices)


def show(asked: Question, found: Answer, html: Path | None, as_json: bool) -> None:
    """Print the answer; when nothing fits, that is the error and the rest goes to stderr beside it."""
    if html is not None:
        try:
            html.write_text(plan_page.page(found, asked.name, asked.assumptions, asked.notes), encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"--html {html}: cannot be written: {error.strerror}") from None
    if as_json:
        echo_json(plan_json.of(found, asked.name, asked.assumptions, asked.notes, asked.imported))
    elif found.best is not None:
        out.print(tables.answer(found, asked.assumptions, asked.notes))
    else:
        err.print(tables.answer(found, asked.assumptions, asked.notes))
    if found.best is None:
        raise InfeasibleError(found.shortage)
