"""Which tensors and kinds each model-stage holds: the schema that transitions, memory and checkpoints share."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.core import Kind, ModelSpec, ModelStage, StateSchema, Workflow, plugins
from nereus.core.ports import Family


def family_of(spec: ModelSpec) -> Family:
    """The family plugin of a spec."""
    family: Family = plugins.make("nereus.families", spec.family, {})
    return family


def dtypes(spec: ModelSpec, trained: bool) -> Mapping[Kind, str]:
    """The kinds a tensor is held in; with an optimizer, also fp32 masters (half precision only) and moments (D5.9)."""
    found = {Kind.PARAM: spec.dtype}
    if trained:
        full = spec.dtype if spec.dtype in ("fp32", "fp64") else "fp32"
        if full != spec.dtype:
            found[Kind.MASTER] = full
        found |= {Kind.EXP_AVG: full, Kind.EXP_AVG_SQ: full}
    return found


def schema(spec: ModelSpec, trained: bool) -> StateSchema:
    """The tensors of a model and the kinds held of them."""
    return StateSchema(spec.layers, family_of(spec).tensors(spec), dtypes(spec, trained))


def schemas(workflow: Workflow) -> Mapping[ModelStage, StateSchema]:
    """The schema of every model-stage of a job."""
    return {ms: schema(workflow.spec(ms), workflow.updated(ms)) for ms in workflow.model_stages}
