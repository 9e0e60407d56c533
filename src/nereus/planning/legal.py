"""Which candidates a model-stage may have at all: cuts of the family, capabilities of the job, pins of the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nereus.core import Candidate, Layout, ModelStage, Pin, Rejection, SettingsError, Stage, Work
from nereus.cost.memory import sequence_kv_bytes, share
from nereus.cost.state import family_of
from nereus.planning.problem import Problem

EXACT_POOL = 16
"""Up to so many devices every DP and PP degree is looked at; beyond, powers of two and the largest that fits."""


@dataclass(slots=True)
class Refusals:
    """Why things were refused, one entry for each reason and thing."""

    found: dict[tuple[str, str], None] = field(default_factory=dict)

    def add(self, what: Candidate | str, reason: str) -> None:
        """Note a refusal; repeated ones count once."""
        self.found.setdefault((what if isinstance(what, str) else label(what), reason))

    def all(self) -> tuple[Rejection, ...]:
        """Every refusal, in the order found."""
        return tuple(Rejection(what, reason) for what, reason in self.found)


def label(candidate: Candidate) -> str:
    """A candidate with all that tells it from its neighbours."""
    recompute = f" recompute {candidate.recompute}" if candidate.recompute != "none" else ""
    return f"{candidate}{recompute}"


def check_pins(problem: Problem) -> None:
    """Raise SettingsError for a pin that no candidate can meet."""
    known = set(problem.workflow.model_stages)
    for model_stage, pin in problem.capabilities.pins.items():
        if model_stage not in known:
            valid = ", ".join(map(str, problem.workflow.model_stages))
            raise SettingsError(f"plan: {model_stage} is pinned but is not part of the job, valid: {valid}")
        _check_degrees(problem, model_stage, pin)
        _check_shares(problem, model_stage, pin)
        gone = sorted(set(pin.devices or ()) - set(problem.cluster.ids))
        if gone:
            raise SettingsError(
                f"plan: {model_stage} is pinned to devices {gone}, there are {list(problem.cluster.ids)}"
            )


def legal(problem: Problem, model_stage: ModelStage, pool: int, refusals: Refusals) -> Iterator[Candidate]:
    """Every legal candidate on at most `pool` devices, dominated ones included."""
    for layout in _layouts(problem, model_stage, pool, refusals):
        for dp in _replicas(problem, model_stage, layout, pool, refusals):
            yield from _variants(problem, model_stage, layout, dp, refusals)


def legal_tp(problem: Problem, model_stage: ModelStage) -> tuple[int, ...]:
    """TP degrees that cut the model and that the job can do."""
    spec, able = problem.workflow.spec(model_stage), problem.capabilities
    return tuple(
        tp
        for tp in family_of(spec).legal_tp(spec)
        if (not able.tp or tp in able.tp) and (able.max_tp is None or tp <= able.max_tp)
    )


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
    work = problem.workload
    if pin.dp is not None and pin.dp > work.mini_batch:
        raise SettingsError(
            f"plan: {model_stage} has dp pinned to {pin.dp}, but a mini-batch has {work.mini_batch} sequences: "
            f"valid DP 1 to {work.mini_batch}"
        )
    largest = _share(problem, model_stage, pin.dp or 1)
    if pin.micro_batch is not None and pin.micro_batch > largest:
        raise SettingsError(
            f"plan: {model_stage} has micro_batch pinned to {pin.micro_batch}, but the largest share "
            f"is {largest} sequences at dp {pin.dp or 1}: valid micro-batches 1 to {largest}"
        )


def _share(problem: Problem, model_stage: ModelStage, dp: int) -> int:
    work = Work.UPDATE if problem.workflow.updated(model_stage) else Work.FORWARD
    return share(work, problem.workload, dp)


def _layouts(problem: Problem, model_stage: ModelStage, pool: int, refusals: Refusals) -> Iterator[Layout]:
    spec, able = problem.workflow.spec(model_stage), problem.capabilities
    pin, valid = able.pin(model_stage), legal_tp(problem, model_stage)
    for tp in _powers(pool):
        if tp not in valid and pin.tp is None:
            words = f"{spec.heads} heads, {spec.kv_heads} KV heads: valid TP {', '.join(map(str, valid))}"
            refusals.add(f"{model_stage} tp{tp}", words)
    for tp in valid:
        for pp in _degrees(pool // tp):
            if (pin.tp or tp) != tp or (pin.pp or pp) != pp or (able.pp and pp not in able.pp):
                continue
            if pp > spec.layers:
                refusals.add(f"{model_stage} pp{pp}", f"the model has {spec.layers} layers")
            elif able.max_pp is None or pp <= able.max_pp:
                yield Layout(tp, pp)


def _replicas(
    problem: Problem, model_stage: ModelStage, layout: Layout, pool: int, refusals: Refusals
) -> Iterator[int]:
    work, pin = problem.workload, problem.capabilities.pin(model_stage)
    fits = pool // layout.size
    for dp in _degrees(fits) if pin.dp is None else (pin.dp,):
        if dp > fits:
            refusals.add(f"{model_stage} {layout} dp{dp}", f"needs {dp * layout.size} devices of {pool}")
        elif dp > work.mini_batch:
            refusals.add(f"{model_stage} dp{dp}", f"a mini-batch has {work.mini_batch} sequences")
        elif not problem.capabilities.uneven_shares and (work.mini_batch % dp or work.sequences % dp):
            refusals.add(f"{model_stage} dp{dp}", f"does not divide the batch of {work.mini_batch} evenly")
        else:
            yield dp


def _variants(
    problem: Problem, model_stage: ModelStage, layout: Layout, dp: int, refusals: Refusals
) -> Iterator[Candidate]:
    if model_stage.stage is Stage.GENERATION:
        yield from _generation(problem, model_stage, layout, dp)
        return
    able, pin = problem.capabilities, problem.capabilities.pin(model_stage)
    largest = _share(problem, model_stage, dp)
    asked: Sequence[int] = able.micro_batches or _powers(largest)
    for size in asked if pin.micro_batch is None else (pin.micro_batch,):
        name = f"{model_stage} {layout} dp{dp} mb{size}"
        if size > largest:
            refusals.add(name, f"the largest share is {largest} sequences")
        elif not able.uneven_shares and largest % size:
            refusals.add(name, f"does not divide the share of {largest} sequences")
        else:
            for recompute in able.recompute if problem.workflow.updated(model_stage) else ("none",):
                yield Candidate(model_stage, layout, dp, size, recompute)


def _generation(problem: Problem, model_stage: ModelStage, layout: Layout, dp: int) -> Iterator[Candidate]:
    """All sequences of a share at once, or as many as a smaller KV budget lets decode at the same time."""
    spec, pin = problem.workflow.spec(model_stage), problem.capabilities.pin(model_stage)
    whole = share(Work.GENERATE, problem.workload, dp)
    one_bytes = sequence_kv_bytes(spec, layout, problem.workload)
    for size in [whole, *reversed(_powers(whole - 1))] if pin.micro_batch is None else [min(pin.micro_batch, whole)]:
        yield Candidate(model_stage, layout, dp, size, kv_bytes=size * one_bytes if size < whole else 0)


def _powers(largest: int) -> list[int]:
    return [1 << power for power in range(largest.bit_length())] if largest > 0 else []


def _degrees(largest: int) -> list[int]:
    if largest <= EXACT_POOL:
        return list(range(1, largest + 1))
    return sorted({*_powers(largest), largest})
