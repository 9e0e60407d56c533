"""A job whose truth is the cost model under rates that the brain does not know: observations with a known answer."""

from __future__ import annotations

from dataclasses import replace

from nereus.controller.admission.payback import Payback as Rule
from nereus.controller.brain import Brain
from nereus.core import (
    Calibration,
    Capabilities,
    ControllerState,
    Efficiency,
    Lengths,
    ModelSpec,
    Observation,
    Timing,
    Workflow,
    plugins,
)
from nereus.core.ports import AdmissionRule
from nereus.cost import operations
from nereus.cost.state import schemas
from nereus.cost.step import StepModel
from tests.fakes import seen

SPEC = ModelSpec(family="llama", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn_hidden=128, vocab=64)
TRUTH = Calibration({name: Efficiency(0.05, 9, 0.0) for name in operations.CLASSES})


def workflow() -> Workflow:
    """GRPO: generation, reference, training."""
    algorithm = plugins.make("nereus.algorithms", "grpo", {})
    made: Workflow = algorithm.workflow({role: SPEC for role in algorithm.models()})
    return made


WORKFLOW = workflow()
SCHEMAS = schemas(WORKFLOW)


def brain(rule: AdmissionRule | None = None, capabilities: Capabilities | None = None) -> Brain:
    """A brain for the GRPO job."""
    return Brain(WORKFLOW, capabilities or Capabilities(recompute=("none",)), SCHEMAS, rule or Rule())


def happened(
    state: ControllerState,
    step: int,
    ready: tuple[int, ...],
    response: Lengths | None = None,
    departing: frozenset[int] = frozenset(),
    peak_scale: float = 1.0,
    extra_s: float = 0.0,
) -> Observation:
    """What a step under the state's plan shows, with times and peaks that follow `TRUTH`."""
    work = replace(state.workload, response=response or state.workload.response)
    model = StepModel(WORKFLOW, work, state.pool, TRUTH)
    predicted = model.estimate(state.plan)
    timings = {
        key: Timing(ideal_s / operations.efficiency(TRUTH, key.rpartition(":")[2]).value, 1)
        for key, ideal_s in model.breakdown(state.plan).items()
    }
    return seen(
        step,
        ready,
        response=work.response,
        departing=departing,
        timings=timings,
        call_s=predicted.call_s,
        step_s=predicted.step_s + extra_s,
        peaks={device: int(peak * peak_scale) for device, peak in predicted.peak_bytes.items()},
    )
