"""From the `models:` section to specs: sizes, or the headers of a model directory, checked against its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus.core import Head, ModelSpec, SettingsError, plugins
from nereus.core.model_dir import ModelDir
from nereus.core.ports import Family
from nereus.families.models.given import given
from nereus.settings.schema import Named, Settings, Sizes

SCALAR_ROLES = ("critic", "reward")
FAMILIES = "nereus.families"

Model = str | Named | Sizes


def chosen(settings: Settings, role: str) -> Model | None:
    """What the settings say about a role's model; a reference that is not given is the actor."""
    model: Model | None = getattr(settings.models, role, None)
    return settings.models.actor if model is None and role == "reference" else model


def specs(settings: Settings, roles: tuple[str, ...]) -> dict[str, ModelSpec]:
    """The sizes of every role's model. Raises SettingsError for one that is missing, broken or does not fit in."""
    missing = [role for role in roles if chosen(settings, role) is None]
    if missing:
        raise SettingsError(
            f"models.{missing[0]} is missing: {settings.algorithm.use} needs a model for {', '.join(roles)}"
        )
    found = {role: spec(chosen(settings, role), role, settings.precision) for role in roles}
    check_vocabularies(found, "models.{role}")
    return found


def check_vocabularies(found: Mapping[str, ModelSpec], where: str) -> None:
    """Raises SettingsError for a model that does not know all of the actor's tokens."""
    for role, sizes in found.items():
        if sizes.vocab < found["actor"].vocab:
            raise SettingsError(
                f"{where.format(role=role)} has a vocabulary of {sizes.vocab} tokens, the actor one of "
                f"{found['actor'].vocab}: every model reads the actor's tokens"
            )


def planned(model: str, role: str, precision: str) -> ModelSpec:
    """The sizes of a model to plan with, its head that of its role: a known name, or a directory without weights."""
    return given(model, precision, Head.SCALAR if role in SCALAR_ROLES else Head.LM)


def spec(model: Model | None, role: str, precision: str) -> ModelSpec:
    """The sizes of one role's model, in the job's precision, with a scalar head for critic and reward."""
    if isinstance(model, Named):
        return planned(model.name, role, precision)
    if isinstance(model, Sizes):
        try:
            own = family(model.family).spec(_config(model))
        except SettingsError as error:
            raise SettingsError(f"models.{role}: {error}") from None
        return _for_role(own, role, precision)
    directory = ModelDir.read(Path(str(model)))
    kind = directory.config.get("model_type")
    if kind not in plugins.names(FAMILIES):
        valid = ", ".join(plugins.names(FAMILIES))
        raise SettingsError(f"model directory {model}: model_type {kind!r} is not supported, valid: {valid}")
    architecture = family(str(kind))
    own = architecture.spec(directory.config)
    needed = _for_role(own, role, precision)
    tensors = architecture.tensors(needed)
    head = {tensor.name for tensor in tensors} - {tensor.name for tensor in architecture.tensors(own)}
    directory.check(tensors, may_lack=head if role == "critic" else ())
    return needed


def family(name: str) -> Family:
    """The plugin of an architecture."""
    made: Family = plugins.make(FAMILIES, name, {})
    return made


def _for_role(own: ModelSpec, role: str, precision: str) -> ModelSpec:
    if role in SCALAR_ROLES:
        return replace(own, dtype=precision, head=Head.SCALAR, tied_embeddings=False)
    return replace(own, dtype=precision, head=Head.LM)


def _config(sizes: Sizes) -> Mapping[str, Any]:
    """The `config.json` that these sizes would have."""
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn_hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "tie_word_embeddings": sizes.tied_embeddings,
    }
