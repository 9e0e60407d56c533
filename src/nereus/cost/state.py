"""Which tensors and kinds each model-stage holds: the schema that transitions, memory and checkpoints share."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.core import Kind, ModelSpec, ModelStage, StateSchema, Workflow, plugins
from nereus.core.ports import Family


def family_of(spec: ModelSpec) -> Family:
    """The family plugin of a spec."""
    family: Family = plugins.make("nereus.families", spec.family, {})
    return family


def schema(spec: ModelSpec, trained: bool) -> StateSchema:
    """The tensors of a model; with an optimizer, also fp32 masters (bf16 only) and both Adam moments (D5.9)."""
    dtypes = {Kind.PARAM: spec.dtype}
    if trained:
        full = "fp32" if spec.dtype in ("bf16", "fp16") else spec.dtype
        if full != spec.dtype:
            dtypes[Kind.MASTER] = full
        dtypes |= {Kind.EXP_AVG: full, Kind.EXP_AVG_SQ: full}
    return StateSchema(spec.layers, family_of(spec).tensors(spec), dtypes)


def schemas(workflow: Workflow) -> Mapping[ModelStage, StateSchema]:
    """The schema of every model-stage of a job."""
    return {ms: schema(workflow.spec(ms), workflow.updated(ms)) for ms in workflow.model_stages}
