"""The options of `nereus plan`, one field each: what is asked, of which host, and how the answer is shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from nereus.cli._app import AsJson, Overrides
from nereus.integrations import hosts
from nereus.settings import imports

JOB, WORK, HOST, SHOW = "Models and machines", "What a step handles", "What the host can do", "What is shown"


def option(text: str, panel: str, metavar: str | None = None, name: str | None = None) -> Any:
    """An option with its help."""
    return typer.Option(*([name] if name else []), help=text, rich_help_panel=panel, metavar=metavar)


Name = Annotated[str | None, option("See: nereus list models.", JOB, "NAME|DIR")]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """As given; None where one was left out. The fields of `Flags` and `Host` have the same names."""

    job: Annotated[
        Path | None, typer.Argument(help="A job's YAML, or with --from the configuration.", metavar="FILE")
    ] = None
    overrides: Overrides = None
    framework: Annotated[
        str | None, typer.Option("--from", metavar="FRAMEWORK", help=f"FILE is of {', '.join(imports.FRAMEWORKS)}.")
    ] = None
    variables: Annotated[
        list[str] | None, typer.Option("--var", metavar="NAME=VALUE", help="Set what FILE leaves open, with --from.")
    ] = None
    model: Name = None
    critic_model: Name = None
    reward_model: Name = None
    reference_model: Name = None
    verifier: Annotated[bool, option("Rewards come without a model.", JOB, name="--verifier")] = False
    precision: Annotated[str | None, option("bf16, fp16, fp32, or fp8 for matrix products alone.", JOB)] = None
    generation_precision: Annotated[str | None, option("bf16 or fp8, if not --precision.", JOB)] = None
    cluster: Annotated[str | None, option("Machines by name (h200x8), or a cluster file.", JOB, "NAME|FILE")] = None
    nodes: Annotated[int | None, option("How many machines.", JOB, "N")] = None
    devices: Annotated[int | None, option("Plan for the first N devices instead.", JOB, "N")] = None
    algorithm: Annotated[str | None, option("See: nereus list algorithms.", WORK, "NAME")] = None
    prompt: Annotated[str | None, option("Prompt tokens.", WORK, "MEAN[:MAX]")] = None
    response: Annotated[str | None, option("Response tokens.", WORK, "MEAN[:P95[:MAX]]")] = None
    batch: Annotated[int | None, option("Prompts of a step.", WORK, "N")] = None
    samples: Annotated[int | None, option("Responses of a prompt.", WORK, "N")] = None
    mini_batch: Annotated[int | None, option("Sequences of an update.", WORK, "N")] = None
    epochs: Annotated[int | None, option("Passes over the batch.", WORK, "N")] = None
    packed: Annotated[
        bool | None,
        option(
            "Sequences of a micro-batch lie end to end, or are padded to the longest.", WORK, name="--packed/--padded"
        ),
    ] = None
    asynchronous: Annotated[
        bool, option("Generation goes on beside training, from the weights before.", WORK, name="--asynchronous")
    ] = False
    made_for: Annotated[
        str | None,
        option(f"Only what it can run: {', '.join(hosts.NAMES)}.", HOST, "FRAMEWORK[:BACKEND]", "--for"),
    ] = None
    pin: Annotated[
        list[str] | None, option("Fix degrees, such as actor/training=tp4,pp2,dp8,mb1.", HOST, "MODEL/STAGE=...")
    ] = None
    dp: Annotated[str | None, option("Replicas: any number, or powers of two.", HOST, "any|powers")] = None
    recompute: Annotated[str | None, option("Of none, selective, full.", HOST, "MODE,...")] = None
    zero: Annotated[str | None, option("ZeRO levels, of 0, 1, 2, 3.", HOST, "LEVEL,...")] = None
    cp: Annotated[str | None, option("Context-parallel degrees.", HOST, "DEGREE,...")] = None
    vpp: Annotated[str | None, option("Interleaved pipeline stages.", HOST, "DEGREE,...")] = None
    expert_parallel: Annotated[bool, option("Experts may be spread over devices.", HOST, name="--expert-parallel")] = (
        False
    )
    sequence_parallel: Annotated[
        bool, option("Activations may be cut inside a TP group.", HOST, name="--sequence-parallel")
    ] = False
    offload: Annotated[bool, option("Idle model-stages may wait in host memory.", HOST, name="--offload")] = False
    even_shares: Annotated[bool, option("DP and micro-batch must divide the batch.", HOST, name="--even-shares")] = (
        False
    )
    top: Annotated[int, option("How many plans.", SHOW, "K")] = 8
    advice: Annotated[bool, option("Look for what would help.", SHOW)] = True
    html: Annotated[Path | None, option("Also write a page with pictures.", SHOW, "FILE")] = None
    as_json: AsJson = False
