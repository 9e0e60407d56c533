"""When nothing fits: the plan that would fit in the least memory, and what it lacks."""

from __future__ import annotations

from nereus.core import InfeasibleError, Plan
from nereus.cost.step import StepModel
from nereus.planning.choices import Choices
from nereus.planning.judge import explain_shortage, shortage
from nereus.planning.problem import Problem
from nereus.planning.select import fastest

LARGEST = 1 << 20
"""No device is looked for that has more times the memory of those there are."""
PRECISION = 1e-6
SMALL = 8
"""Up to so many devices, plans that only fit device by device are looked for where too few fit otherwise."""


def nothing_fits(problem: Problem, model: StepModel, choices: Choices, lean: Plan | None) -> InfeasibleError | None:
    """The error that says what the leanest plan lacks, on which device and why; None when it fits after all."""
    devices = len(problem.cluster.devices)
    where = f"no plan fits {devices} devices"
    for model_stage in problem.workflow.model_stages:
        if not choices.exists(model_stage):
            reasons = {r.reason for r in choices.refusals.all() if r.plan.startswith(str(model_stage))}
            words = "; ".join(sorted(reasons)) or "its degrees need more devices than there are"
            return InfeasibleError(f"{where}: {model_stage} has no layout there ({words})")
    if lean is None:
        return InfeasibleError(f"{where}: no two model-stages share these devices whatever their memory")
    peaks = model.peaks(lean)
    short = shortage(problem, peaks)
    if not short:
        return None
    counted = f" (above {SMALL} devices the fullest pp ranks of model-stages are counted as if on one device)"
    where += counted if devices > SMALL else ""
    return InfeasibleError(
        f"{where}; the one that needs least is {lean.describe()}: {explain_shortage(problem, peaks)}", short
    )


def leanest(choices: Choices) -> Plan | None:
    """The plan that fits devices as much larger as need be, and no smaller ones; None where none ever fits."""

    def fitting(times: float) -> Plan | None:
        arrangements = list(choices.arrangements(times))
        found = list(fastest(arrangements, choices.problem.workflow, 1).found.values())
        return choices.plan(arrangements[found[0].arrangement], found[0]) if found else None

    low, high, best = 1.0, 2.0, fitting(2.0)
    while best is None and high < LARGEST:
        low, high = high, 4 * high
        best = fitting(high)
    while best is not None and high - low > PRECISION * high:
        middle = (low + high) / 2
        found = fitting(middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return best
