"""What `nereus plan` is asked, whichever way: a job file, flags, or another framework's launch configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from nereus import settings as build
from nereus.core import Capabilities, ModelStage, Pin, Plan, SettingsError
from nereus.core.plan import RECOMPUTE
from nereus.planning.legal import check_pins
from nereus.planning.problem import Problem
from nereus.settings.pins import check_pin_devices, parse_pin

WIDEST = Capabilities(
    recompute=RECOMPUTE,
    zero=(0, 1, 2, 3),
    expert_parallel=True,
    sequence_parallel=True,
    offload=True,
)
"""What the hosts that a plan may be made for can be told to do."""


@dataclass(frozen=True, slots=True)
class Question:
    """A problem and where it comes from. `own` is the plan that the asker has, to be judged beside the best one."""

    name: str
    problem: Problem
    models: Mapping[str, str] = field(default_factory=dict)
    """Model by role as it was named."""
    widest: Capabilities = WIDEST
    assumptions: tuple[str, ...] = ()
    """What was not said and was taken to be so, each with the way to say it."""
    notes: tuple[str, ...] = ()
    own: Plan | None = None
    unplaced: str = ""
    """Why there is no `own` plan where there should be one."""
    imported: Mapping[str, object] = field(default_factory=dict)
    """What another framework's configuration states, by the field's common names."""

    def able(self, **fields: object) -> Question:
        """The question with other capabilities."""
        if not fields:
            return self
        able = replace(self.problem.capabilities, **fields)  # type: ignore[arg-type]
        return replace(self, problem=replace(self.problem, capabilities=able))

    def pinned(self, texts: Sequence[str]) -> Question:
        """The question with degrees fixed, each as `actor/training=tp4,pp2,dp8`. Raises SettingsError.

        What the host itself fixes of a model-stage stays fixed.
        """
        given: dict[ModelStage, Pin] = dict(parse_pin(text, self.problem.workflow) for text in texts)
        both = {ms: _inside(ms, pin, self.widest.pins.get(ms, Pin())) for ms, pin in given.items()}
        asked = self.able(pins={**self.problem.capabilities.pins, **both})
        check_pins(asked.problem)
        for model_stage, pin in given.items():
            check_pin_devices(f"--pin {model_stage}", pin, self.problem.cluster)
        return asked

    def on(self, devices: int | None) -> Question:
        """The question for the first so many devices. Raises SettingsError when there are fewer."""
        if devices is None:
            return self
        cluster = self.problem.cluster
        if not 1 <= devices <= len(cluster.ids):
            raise SettingsError(f"{devices} devices, the cluster has 1 to {len(cluster.ids)}")
        return replace(self, problem=replace(self.problem, cluster=cluster.only(cluster.ids[:devices])))


def _inside(model_stage: ModelStage, pin: Pin, host: Pin) -> Pin:
    """A pin with what its host fixes. Raises SettingsError where they differ."""
    fixed = {each.name: value for each in fields(host) if (value := getattr(host, each.name)) is not None}
    for name, value in fixed.items():
        if getattr(pin, name) not in (None, value):
            raise SettingsError(
                f"--pin {model_stage}: {name} {getattr(pin, name)}, valid: {name} {value}, all that its host runs there"
            )
    return replace(pin, **fixed)


def of_job(path: Path, overrides: Sequence[str], devices: int | None) -> Question:
    """The question that a job file asks. What the built-in trainer cannot do is not proposed for a job it could run."""
    settings = build.resolve(path, overrides)
    problem = build.problem(settings, devices)
    widest = Capabilities(recompute=("none", "full")) if build.trainable(settings) else WIDEST
    sampled = problem.workload.response
    assumptions = (
        f"responses of {sampled.mean:g} tokens in the mean, p95 {sampled.p95:.0f}, longest {sampled.maximum:.0f}: "
        "ends equally likely at every token (workload.expected_response_tokens, sampling.max_response_tokens)",
    )
    models = {role: _named(build.models.chosen(settings, role)) for role in problem.workflow.specs}
    return Question(path.stem, problem, models, widest, assumptions)


def _named(model: object) -> str:
    if isinstance(model, str):
        return model
    return str(getattr(model, "name", "given by its sizes"))
