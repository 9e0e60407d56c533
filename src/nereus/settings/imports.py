"""A planning question that another framework's launch configuration asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nereus.core import Capabilities, Lengths, SettingsError, Stage
from nereus.integrations import FRAMEWORKS, Imported, Refusal, RefusedImportError, batch, job, read
from nereus.integrations.stated import stated
from nereus.planning.problem import Problem
from nereus.settings.flags import REQUIRED, Flags, prompt_lengths, response_lengths
from nereus.settings.question import WIDEST, Question

TAKEN = ("model", "critic_model", "reward_model", "reference_model", "cluster", "nodes", "prompt", "response")
"""Flags that add to a configuration, or replace what it names."""

LEFT_OPEN = "; --var NAME=VALUE sets a variable or key that the file leaves open"
HINTS = {
    Refusal.NO_MODEL: ": --model NAME|DIR",
    Refusal.UNRESOLVED: LEFT_OPEN,
    Refusal.NO_DEVICES: LEFT_OPEN,
    Refusal.NO_BATCH: LEFT_OPEN,
}
"""What to do about a refusal on the command line."""

__all__ = ["FRAMEWORKS", "question"]


def question(framework: str, path: Path, flags: Flags, variables: Sequence[str] = ()) -> Question:
    """The question of a configuration; flags say what it leaves open, `variables` set what its shell would.

    Raises SettingsError for what cannot be read, InfeasibleError for machines that it does not fit on.
    """
    said = [name for name in flags.given() if name.replace("-", "_") not in TAKEN]
    if said:
        raise SettingsError(f"--{said[0]}: {path} says it; --var sets a variable or key that it leaves open")
    try:
        return _question(framework, path, flags, _variables(variables))
    except RefusedImportError as error:
        raise SettingsError(f"{error}{HINTS.get(error.reason, '')}") from None


def _question(framework: str, path: Path, flags: Flags, variables: Mapping[str, str]) -> Question:
    found = read(framework, path, variables)
    if flags.cluster is None:
        raise SettingsError(f"{path} does not say which devices: --cluster ({REQUIRED['cluster']()})")
    names = {
        role: str(name)
        for role, name in (
            ("actor", flags.model),
            ("critic", flags.critic_model),
            ("reward", flags.reward_model),
            ("reference", flags.reference_model),
        )
        if name is not None
    }
    found = replace(found, models={**found.models, **names})
    sizes = job.specs(found)
    taken: list[str] = []
    prompt, response = _lengths(found, flags, sizes["actor"].max_positions, taken)
    built = job.build(found, job.pool(found, flags.cluster, flags.nodes), sizes, prompt, response)
    problem = Problem(built.workflow, built.workload, built.cluster, built.capabilities)
    return Question(
        name=f"{path.name} ({framework}) on {len(built.cluster.devices):,} devices",
        problem=problem,
        models=found.models,
        widest=_widest(built.capabilities),
        assumptions=(*built.assumptions, *taken),
        notes=built.notes,
        own=built.plan,
        unplaced=built.unplaced,
        imported=stated(found),
    )


def _variables(texts: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise SettingsError(f"--var {text!r}: expected NAME=VALUE")
        found[name.strip()] = value
    return found


def _lengths(found: Imported, flags: Flags, positions: int, taken: list[str]) -> tuple[Lengths | None, Lengths | None]:
    """Lengths that the flags give; None where the configuration's own bounds are to be used."""
    prompt = prompt_lengths(flags.prompt, taken) if flags.prompt else None
    if flags.response is None:
        return prompt, None
    step, longest = batch.step(found), found.batch.max_response_tokens or positions
    sequences = step.prompts * step.samples_per_prompt
    return prompt, response_lengths(flags.response, sequences, longest, taken)


def _widest(able: Capabilities) -> Capabilities:
    """What the framework could be told beyond what the file says; degrees that it cannot cut stay fixed."""
    fixed = any(model_stage.stage is not Stage.GENERATION for model_stage in able.pins)
    wide = Capabilities(recompute=("none", "full"), zero=able.zero, offload=True) if fixed else WIDEST
    experts = able.expert_parallel and not fixed
    return replace(wide, expert_parallel=experts, placement=able.placement, pins=able.pins)
