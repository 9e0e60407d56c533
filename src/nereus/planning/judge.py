"""Whether one plan fits, how fast it is, and in numbers why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.core import Estimate, InfeasibleError, Plan
from nereus.core.sizes import show_bytes
from nereus.cost.peaks import Peak
from nereus.cost.step import StepModel
from nereus.planning.problem import Problem


@dataclass(frozen=True, slots=True)
class Scored:
    """A plan and what the cost model says of it."""

    plan: Plan
    estimate: Estimate


def judge(problem: Problem, plan: Plan) -> Scored:
    """The estimate of a plan that fits. Raises InfeasibleError naming device, bytes, call and term otherwise."""
    model = problem.model()
    reason = misfit(problem, model, plan)
    if reason is not None:
        raise reason
    return Scored(plan, model.estimate(plan))


def misfit(problem: Problem, model: StepModel, plan: Plan) -> InfeasibleError | None:
    """Why a plan cannot run on the problem's devices; None when it can."""
    gone = sorted(plan.devices - set(problem.cluster.ids))
    if gone:
        return InfeasibleError(f"the plan uses devices {gone}, there are {list(problem.cluster.ids)}")
    missing = set(problem.workflow.model_stages) - set(plan.model_stages)
    if missing:
        return InfeasibleError(f"the plan has no layout for {', '.join(sorted(map(str, missing)))}")
    peaks = model.peaks(plan)
    short = shortage(problem, peaks)
    return InfeasibleError(f"the plan does not fit: {explain_shortage(problem, peaks)}", short) if short else None


def shortage(problem: Problem, peaks: Mapping[int, Peak]) -> dict[int, int]:
    """Bytes of capacity that each device lacks, headroom included."""
    usable = problem.capacity()
    size_of = {id(peak): peak.bytes for peak in {id(peak): peak for peak in peaks.values()}.values()}
    """Thousands of devices share a few peaks."""
    short = {
        device: problem.needed_capacity(peak.bytes, device) - problem.cluster.kind(device).memory_bytes
        for device, peak in peaks.items()
        if size_of[id(peak)] > usable[device]
    }
    return {device: max(size, 1) for device, size in short.items()}


def explain_shortage(problem: Problem, peaks: Mapping[int, Peak]) -> str:
    """The device that lacks most: what it has, what it would need, and what makes its peak."""
    short = shortage(problem, peaks)
    device = max(short, key=lambda d: (short[d], -d))
    peak, capacity = peaks[device], problem.cluster.kind(device).memory_bytes
    smallest = problem.needed_capacity(peak.bytes, device)
    return (
        f"device {device} has {capacity:,} bytes ({show_bytes(capacity)}) and is {short[device]:,} bytes short "
        f"({show_bytes(short[device])}); its peak is "
        f"{show_bytes(peak.bytes)} ({peak.describe()}) and {problem.headroom:.0%} stays free; "
        f"the smallest capacity that would do is {smallest:,} bytes ({show_bytes(smallest)})"
    )
