"""Which degrees a model-stage may have at all, and pins that no candidate can meet."""

from __future__ import annotations

from functools import cache
from math import isqrt

from nereus.core import ModelSpec, ModelStage, Pin, SettingsError, Stage, Work
from nereus.cost.memory import share
from nereus.cost.state import family_of
from nereus.planning.problem import Problem


def check_pins(problem: Problem) -> None:
    """Raise SettingsError for a pin that no candidate can meet."""
    known, ids = set(problem.workflow.model_stages), set(problem.cluster.ids)
    for model_stage, pin in problem.capabilities.pins.items():
        if model_stage not in known:
            valid = ", ".join(map(str, problem.workflow.model_stages))
            raise SettingsError(f"plan: {model_stage} is pinned but is not part of the job, valid: {valid}")
        _check_degrees(problem, model_stage, pin)
        _check_shares(problem, model_stage, pin)
        gone = sorted(set(pin.devices or ()) - ids)
        if gone:
            raise SettingsError(f"plan: {model_stage} is pinned to devices {gone}, there are {sorted(ids)}")


def legal_tp(problem: Problem, model_stage: ModelStage) -> tuple[int, ...]:
    """TP degrees that cut the model and that the job can do."""
    spec, able = problem.workflow.spec(model_stage), problem.capabilities
    return tuple(
        tp for tp in _cut(spec) if (not able.tp or tp in able.tp) and (able.max_tp is None or tp <= able.max_tp)
    )


@cache
def _cut(spec: ModelSpec) -> tuple[int, ...]:
    return family_of(spec).legal_tp(spec)


def _check_degrees(problem: Problem, model_stage: ModelStage, pin: Pin) -> None:
    spec = problem.workflow.spec(model_stage)
    for name, degree in (("tp", pin.tp), ("pp", pin.pp), ("dp", pin.dp), ("micro_batch", pin.micro_batch)):
        if degree is not None and degree < 1:
            raise SettingsError(f"plan: {model_stage} has {name} pinned to {degree}, must be at least 1")
    valid = legal_tp(problem, model_stage)
    if pin.tp is not None and pin.tp not in valid:
        fit = [tp for tp in valid if tp <= max(pin.tp, len(problem.cluster.ids))]
        raise SettingsError(
            f"plan: {model_stage} has tp pinned to {pin.tp}, but the model has {spec.heads} heads and "
            f"{spec.kv_heads} KV heads: valid TP {', '.join(map(str, fit))}"
        )
    if pin.pp is not None and pin.pp > spec.layers:
        raise SettingsError(
            f"plan: {model_stage} has pp pinned to {pin.pp}, but the model has {spec.layers} layers: "
            f"valid PP 1 to {spec.layers}"
        )


def _check_shares(problem: Problem, model_stage: ModelStage, pin: Pin) -> None:
    work = Work.UPDATE if problem.workflow.updated(model_stage) else Work.FORWARD
    whole = share(work, problem.workload, 1)
    part = "a mini-batch" if work is Work.UPDATE else "the batch"
    if pin.dp is not None and pin.dp > whole:
        raise SettingsError(
            f"plan: {model_stage} has dp pinned to {pin.dp}, but {part} has {whole} sequences: valid DP 1 to {whole}"
        )
    largest = share(work, problem.workload, pin.dp or 1)
    if pin.micro_batch is not None and pin.micro_batch > largest:
        raise SettingsError(
            f"plan: {model_stage} has micro_batch pinned to {pin.micro_batch}, but the largest share "
            f"is {largest} sequences at dp {pin.dp or 1}: valid micro-batches 1 to {largest}"
        )
    if not problem.capabilities.uneven_shares:
        _check_even(problem, model_stage, pin, whole // (pin.dp or 1))


def _check_even(problem: Problem, model_stage: ModelStage, pin: Pin, share_size: int) -> None:
    """Replicas x micro-batch x accumulation must be the mini-batch, which divides the batch."""
    whole, dp = problem.workload.mini_batch, pin.dp or 1
    if whole % dp:
        raise SettingsError(
            f"plan: {model_stage} has dp pinned to {dp}, but shares must be equal and a mini-batch has {whole} "
            f"sequences: the nearest valid DP are {_nearest(whole, dp)}"
        )
    size = pin.micro_batch or 1
    if model_stage.stage is not Stage.GENERATION and share_size % size:
        raise SettingsError(
            f"plan: {model_stage} has micro_batch pinned to {size}, but micro-batches must be equal and a share is "
            f"{share_size} sequences at dp {dp}: the nearest valid micro-batches are {_nearest(share_size, size)}"
        )


def _nearest(whole: int, value: int) -> str:
    """The divisors of `whole` next to a value that is none."""
    small = [each for each in range(1, isqrt(whole) + 1) if whole % each == 0]
    divisors = [*small, *(whole // each for each in small)]
    below, above = max(each for each in divisors if each < value), [each for each in divisors if each > value]
    return f"{below} and {min(above)}" if above else str(below)
