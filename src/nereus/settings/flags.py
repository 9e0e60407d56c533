"""A planning question asked by flags alone: models and machines by name, lengths, batch. No silent assumptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from nereus.clusters import file, named
from nereus.core import (
    Capabilities,
    Cluster,
    Lengths,
    ModelSpec,
    ModelStage,
    SettingsError,
    Stage,
    Workflow,
    Workload,
    plugins,
)
from nereus.core.plan import RECOMPUTE
from nereus.core.ports import Algorithm
from nereus.cost import lengths as distribution
from nereus.integrations import hosts
from nereus.integrations.habits import said, used_by
from nereus.planning.problem import Problem
from nereus.settings import models
from nereus.settings.build import expected_lengths
from nereus.settings.host import Host
from nereus.settings.question import Question

ALGORITHMS = "nereus.algorithms"
PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
LOW = "fp8"
"""Of matrix products alone: all else stays in bf16."""
SEQUENCES = 1024
"""Sequences of a step where no batch is given."""
ANY_HOST = Host()
SAMPLES = {"grpo": 8}
"""Responses of a prompt where none is given: a group to compare, else one."""
ABLE = Capabilities(recompute=RECOMPUTE)
"""What every host of a plan can do; more is asked for by flags."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags as given; None where one was left out."""

    algorithm: str | None = None
    model: str | None = None
    cluster: str | None = None
    nodes: int | None = None
    prompt: str | None = None
    response: str | None = None
    critic_model: str | None = None
    reward_model: str | None = None
    reference_model: str | None = None
    verifier: bool = False
    precision: str | None = None
    generation_precision: str | None = None
    batch: int | None = None
    samples: int | None = None
    mini_batch: int | None = None
    epochs: int | None = None
    packed: bool | None = None
    asynchronous: bool = False

    def given(self) -> tuple[str, ...]:
        """The flags that were given. Switches are given when they are on, `packed` also when it is off."""
        left_out = {field.name: (None,) if field.name == "packed" else (None, False) for field in fields(self)}
        return tuple(name.replace("_", "-") for name in left_out if getattr(self, name) not in left_out[name])


REQUIRED: Mapping[str, Callable[[], str]] = {
    "algorithm": lambda: ", ".join(plugins.names(ALGORITHMS)),
    "model": lambda: "a name of `nereus list models`, or a Hugging Face directory",
    "cluster": lambda: "a machine of `nereus list clusters` such as h200x8, or a cluster file",
    "nodes": lambda: "how many machines",
    "prompt": lambda: "MEAN[:MAX] tokens",
    "response": lambda: "MEAN[:P95[:MAX]] tokens",
}


def question(flags: Flags, host: Host = ANY_HOST) -> Question:
    """The question that flags ask; what `host` leaves open is assumed.

    Raises SettingsError for what is missing, unknown or out of range.
    """
    missing = [f"--{name} ({valid()})" for name, valid in REQUIRED.items() if getattr(flags, name) is None]
    if flags.cluster is not None and Path(flags.cluster).suffix in (".yaml", ".yml"):
        missing = [text for text in missing if not text.startswith("--nodes")]
    if missing:
        raise SettingsError(f"planning without a job file needs {', '.join(missing)}")
    taken: list[str] = []
    method = _algorithm(flags)
    specs, names = _specs(flags, method, taken)
    machine = cluster(str(flags.cluster), flags.nodes)
    work = _workload(flags, specs, taken)
    method.check(work)
    flow = replace(method.workflow(specs), asynchronous=flags.asynchronous)
    flow = replace(flow, precisions=_precisions(flags, flow, machine, taken))
    name = f"{flags.algorithm} of {flags.model} on {len(machine.ids):,} devices"
    if host.made_for is not None:
        trainer = hosts.Trainer.parse(host.made_for)
        able = trainer.capabilities(flow, "disaggregated" if flags.asynchronous else "colocated")
        trainer.check(host.capabilities())
        able = replace(able, **host.capabilities())  # type: ignore[arg-type]
        taken.append(hosts.limits(f"{trainer.framework} with {trainer.backend}", able))
        taken += said(trainer.framework)
        asked = Problem(flow, work, used_by(trainer.framework, machine), able)
        return Question(name, asked, names, able, assumptions=tuple(taken))
    if host.dp is None and not host.even_shares:
        _assume(
            taken, "any number of replicas whose shares differ by at most one sequence", "--dp powers, --even-shares"
        )
    _assume(
        taken,
        "hosts that can recompute none, selective or full",
        "--for FRAMEWORK, or more by --zero, --offload, --sequence-parallel, ...",
    )
    return Question(name, Problem(flow, work, machine, ABLE), names, assumptions=tuple(taken))


def cluster(name: str, nodes: int | None) -> Cluster:
    """Machines by name, or those of a cluster file."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return file.read(path, nodes, None)
    if nodes is None:
        raise SettingsError(f"--nodes is missing: how many {name} there are")
    if nodes < 1:
        raise SettingsError(f"--nodes {nodes}, must be at least 1")
    return named.machine(name, nodes)


def _algorithm(flags: Flags) -> Algorithm:
    options = {"reward_model": False} if flags.verifier else {}
    if flags.verifier and flags.reward_model is not None:
        raise SettingsError("--verifier means rewards without a model, --reward-model names one: give one of them")
    made: Algorithm = plugins.make(ALGORITHMS, str(flags.algorithm), options)
    for role in ("critic", "reward", "reference"):
        given = getattr(flags, f"{role}_model")
        if given is not None and role not in made.models():
            raise SettingsError(
                f"--{role}-model {given}: {flags.algorithm} has no {role}, its models are {', '.join(made.models())}"
            )
    return made


def _specs(flags: Flags, method: Algorithm, taken: list[str]) -> tuple[dict[str, ModelSpec], dict[str, str]]:
    precision = flags.precision or PRECISIONS[0]
    if precision not in PRECISIONS:
        raise SettingsError(f"--precision {precision!r}, valid: {', '.join(PRECISIONS)}")
    precision = PRECISIONS[0] if precision == LOW else precision
    if flags.precision is None:
        _assume(taken, "bf16 compute with fp32 master weights and moments", "--precision")
    given = {"actor": flags.model} | {
        role: getattr(flags, f"{role}_model") for role in method.models() if role != "actor"
    }
    names = {role: str(model or flags.model) for role, model in given.items()}
    same = [role for role, model in given.items() if model is None]
    if same:
        how = ", ".join(f"--{role}-model" for role in same) + (" or --verifier" if "reward" in same else "")
        _assume(taken, f"{', '.join(same)} of the actor's sizes", how)
    found = {role: models.planned(name, role, precision) for role, name in names.items()}
    models.check_vocabularies(found, "--{role}-model")
    return found, names


def _precisions(flags: Flags, flow: Workflow, machine: Cluster, taken: list[str]) -> dict[ModelStage, str]:
    """The model-stages whose matrix products run in fp8. Raises SettingsError where the devices have none."""
    apart = flags.generation_precision
    if apart is not None and apart not in (PRECISIONS[0], LOW):
        raise SettingsError(f"--generation-precision {apart!r}, valid: {PRECISIONS[0]}, {LOW}")
    if apart is not None and flags.precision not in (None, PRECISIONS[0], LOW):
        raise SettingsError(f"--generation-precision {apart} goes with --precision bf16 or fp8, not {flags.precision}")
    generating = apart or flags.precision
    wanted = {ms: generating if ms.stage is Stage.GENERATION else flags.precision for ms in flow.model_stages}
    found = {ms: LOW for ms, precision in wanted.items() if precision == LOW}
    if not found:
        return {}
    for kind in machine.kinds.values():
        if LOW not in kind.peak_flops:
            raise SettingsError(f"fp8: {kind.name} computes in {', '.join(kind.peak_flops)}: give --precision bf16")
    stages = ", ".join(dict.fromkeys(str(ms.stage) for ms in found))
    taken.append(f"fp8 for matrix products of layers in {stages}; all else, and what memory holds, is in bf16")
    return found


def _workload(flags: Flags, specs: Mapping[str, ModelSpec], taken: list[str]) -> Workload:
    samples = flags.samples
    if samples is None:
        samples = SAMPLES.get(str(flags.algorithm), 1)
        _assume(taken, f"{samples} response{'s' * (samples > 1)} of each prompt", "--samples")
    prompts = flags.batch
    if prompts is None:
        prompts = max(SEQUENCES // max(samples, 1), 1)
        _assume(taken, f"{prompts:,} prompts a step", "--batch")
    mini_batch = flags.mini_batch
    if mini_batch is None:
        mini_batch = prompts * samples
        _assume(taken, f"one update a step: mini-batches of {mini_batch:,} sequences", "--mini-batch")
    epochs = flags.epochs
    if epochs is None:
        epochs = 1
        _assume(taken, "one pass over the batch", "--epochs")
    for name, value in (("batch", prompts), ("samples", samples), ("mini-batch", mini_batch), ("epochs", epochs)):
        if value < 1:
            raise SettingsError(f"--{name} {value}, must be at least 1")
    positions = min(spec.max_positions for spec in specs.values())
    prompt = prompt_lengths(str(flags.prompt), taken)
    response = response_lengths(str(flags.response), prompts * samples, positions - int(prompt.maximum), taken)
    check_context(prompt, response, specs)
    if flags.packed is None:
        _assume(taken, "every sequence of a micro-batch is padded to the longest of them", "--packed, --padded")
    longest = math.ceil(response.maximum)
    return Workload(prompts, samples, prompt, response, mini_batch, longest, epochs, packed=bool(flags.packed))


def check_context(prompt: Lengths, response: Lengths, specs: Mapping[str, ModelSpec]) -> None:
    """Raises SettingsError where the longest sequence is beyond a model's positions."""
    for role, spec in specs.items():
        if prompt.maximum + response.maximum > spec.max_positions:
            raise SettingsError(
                f"prompts of up to {prompt.maximum:,.0f} and responses of up to {response.maximum:,.0f} tokens "
                f"exceed the {spec.max_positions:,} positions of the {role}"
            )


def prompt_lengths(text: str, taken: list[str]) -> Lengths:
    """Of `MEAN[:MAX]`; what that leaves open is noted in `taken`. Raises SettingsError."""
    numbers = _numbers("--prompt", text, "MEAN[:MAX]", 2)
    if len(numbers) == 1:
        _assume(taken, f"every prompt has {numbers[0]:g} tokens", "--prompt MEAN:MAX")
        return Lengths.constant(numbers[0])
    mean, longest = numbers
    p95 = (mean + longest) / 2
    if mean < longest:
        _assume(taken, f"one prompt of 20 is longer than {p95:g} tokens, half-way from mean to longest", "no flag")
    return Lengths(mean, p95, longest)


def response_lengths(text: str, sequences: int, room: int, taken: list[str]) -> Lengths:
    """Of `MEAN[:P95[:MAX]]`, the longest of `sequences` responses within `room` tokens. Raises SettingsError."""
    numbers = _numbers("--response", text, "MEAN[:P95[:MAX]]", 3)
    if len(numbers) == 3:
        return Lengths(numbers[0], numbers[1], numbers[2])
    mean = numbers[0]
    if len(numbers) == 1:
        found = expected_lengths(mean, sequences, max(room, math.ceil(mean)))
        _assume(
            taken,
            f"responses that end with the same probability at every token: p95 {found.p95:,.0f} tokens, "
            f"the longest of {sequences:,} {found.maximum:,.0f}",
            "--response MEAN:P95:MAX",
        )
        return found
    p95 = numbers[1]
    longest = max(distribution.padded(Lengths(mean, p95, math.inf), sequences), p95)
    longest = min(math.ceil(longest), max(room, p95))
    _assume(
        taken,
        f"the longest of {sequences:,} responses has {longest:,.0f} tokens, as a log-normal tail has it",
        "--response MEAN:P95:MAX",
    )
    return Lengths(mean, p95, longest)


def _assume(taken: list[str], what: str, how: str) -> None:
    """Note what was not said, and how to say it."""
    taken.append(f"{what} ({how})")


def _numbers(flag: str, text: str, form: str, most: int) -> list[float]:
    """Rising numbers of at least 1."""
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= most or not all(1 <= number < math.inf for number in numbers):
        raise SettingsError(f"{flag} {text!r}: expected {form} in tokens, numbers of at least 1")
    if numbers != sorted(numbers):
        raise SettingsError(f"{flag} {text!r}: {form} must not fall")
    return numbers
