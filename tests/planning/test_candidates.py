"""Which candidates are legal, and why others are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nereus.core import Candidate, Capabilities, ModelStage, Pin, Rejection, SettingsError, Stage
from nereus.planning.candidates import candidates
from nereus.planning.legal import Refusals, legal
from nereus.planning.problem import Problem
from tests.cost.jobs import ACTOR, GENERATION, REFERENCE, SMALL, TINY, WORKLOAD, cluster, grpo


def problem(able: Capabilities | None = None, devices: int = 8, **changes: Any) -> Problem:
    return Problem(grpo(SMALL), replace(WORKLOAD, **changes), cluster(devices), able or Capabilities())


def all_legal(asked: Problem, model_stage: ModelStage, pool: int) -> tuple[list[Candidate], tuple[Rejection, ...]]:
    refusals = Refusals()
    return list(legal(asked, model_stage, pool, refusals)), refusals.all()


def test_28_heads_list_exactly_the_legal_degrees() -> None:
    spec = replace(TINY, heads=28, kv_heads=4)
    asked = Problem(grpo(spec), WORKLOAD, cluster(8), Capabilities())
    found, refused = all_legal(asked, GENERATION, 8)
    assert {candidate.layout.tp for candidate in found} == {1, 2, 4}
    (reason,) = (r.reason for r in refused if r.plan == "actor/generation tp8")
    assert "28 heads" in reason
    assert "valid TP 1, 2, 4" in reason


def test_no_more_pp_ranks_than_layers() -> None:
    asked = Problem(grpo(TINY), WORKLOAD, cluster(8), Capabilities())
    found, refused = all_legal(asked, REFERENCE, 8)
    assert max(candidate.layout.pp for candidate in found) == TINY.layers
    assert any(r.plan == "reference/inference pp3" and "2 layers" in r.reason for r in refused)


def test_any_number_of_replicas_up_to_the_mini_batch() -> None:
    found, refused = all_legal(problem(), ACTOR, 8)
    assert {c.dp for c in found if c.layout.size == 1} == {1, 2, 3, 4}
    assert any(r.plan == "actor/training dp5" and "mini-batch has 4 sequences" in r.reason for r in refused)


def test_hosts_that_need_even_shares_get_them() -> None:
    found, _ = all_legal(problem(Capabilities(uneven_shares=False)), ACTOR, 8)
    assert {c.dp for c in found if c.layout.size == 1} == {1, 2, 4}
    assert all(4 % (c.dp * c.micro_batch) == 0 for c in found)


def test_micro_batches_are_powers_of_two_within_the_largest_share() -> None:
    found, _ = all_legal(problem(), ACTOR, 3)
    sizes = {dp: {c.micro_batch for c in found if c.dp == dp and c.layout.size == 1} for dp in (1, 2, 3)}
    assert sizes == {1: {1, 2, 4}, 2: {1, 2}, 3: {1, 2}}


def test_micro_batches_that_a_job_names_are_the_only_ones() -> None:
    found, refused = all_legal(problem(Capabilities(micro_batches=(2, 8))), ACTOR, 1)
    assert {c.micro_batch for c in found} == {2}
    assert any("largest share is 4" in r.reason for r in refused)


def test_only_training_recomputes() -> None:
    asked = problem()
    assert {c.recompute for c in all_legal(asked, ACTOR, 2)[0]} == {"none", "full"}
    assert {c.recompute for c in all_legal(asked, REFERENCE, 2)[0]} == {"none"}


def test_a_kv_budget_holds_a_whole_number_of_sequences() -> None:
    asked = problem(prompts=6)
    found = [c for c in all_legal(asked, GENERATION, 1)[0]]
    assert [(c.micro_batch, c.kv_bytes > 0) for c in found] == [
        (12, False), (8, True), (4, True), (2, True), (1, True),
    ]  # fmt: skip
    one = next(c.kv_bytes for c in found if c.micro_batch == 1)
    assert all(c.kv_bytes == c.micro_batch * one for c in found if c.kv_bytes)


def test_capabilities_bound_the_degrees() -> None:
    found, _ = all_legal(problem(Capabilities(tp=(1, 4), max_tp=2, max_pp=3)), ACTOR, 8)
    assert {c.layout.tp for c in found} == {1}
    assert {c.layout.pp for c in found} == {1, 2, 3}


def test_dominated_candidates_are_dropped_and_counted() -> None:
    asked = problem()
    found, refused = candidates(asked, ACTOR, 2)
    everything, _ = all_legal(asked, ACTOR, 2)
    assert set(found) < set(everything)
    assert len(everything) - len(found) == sum("as fast with less memory" in r.reason for r in refused)
    model = asked.model()
    for one in found:
        for other in found:
            if one is not other and one.layout == other.layout and one.dp == other.dp:
                faster = _seconds(model, one) <= _seconds(model, other)
                assert not (faster and _added(model, one) <= _added(model, other)), (one, other)


def _seconds(model: object, candidate: Candidate) -> tuple[float, ...]:
    size = candidate.layout.size
    units = tuple(tuple(range(u * size, (u + 1) * size)) for u in range(candidate.dp))
    costs = model.costs(candidate, units)  # type: ignore[attr-defined]
    return _Ordered(cost.seconds for cost in costs.values())


def _added(model: object, candidate: Candidate) -> tuple[float, ...]:
    return _Ordered(
        max(
            sum(model.transient(candidate, call, rank).values())  # type: ignore[attr-defined]
            for call in ("old_log_probs", "update_actor")
        )
        for rank in range(candidate.layout.pp)
    )


class _Ordered(tuple[float, ...]):
    """Compared element by element."""

    def __le__(self, other: tuple[float, ...]) -> bool:
        return all(a <= b for a, b in zip(self, other, strict=True))


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (Pin(tp=3), "8 heads and 4 KV heads: valid TP 1, 2, 4, 8"),
        (Pin(pp=9), "pp pinned to 9, but the model has 8 layers: valid PP 1 to 8"),
        (Pin(dp=5), "dp pinned to 5, but a mini-batch has 4 sequences"),
        (Pin(dp=2, micro_batch=3), "largest share is 2 sequences"),
        (Pin(tp=0), "tp pinned to 0, must be at least 1"),
        (Pin(devices=(0, 77)), r"devices \[77\]"),
    ],
)
def test_pins_that_nothing_can_meet(pin: Pin, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        candidates(problem(Capabilities(pins={ACTOR: pin})), ACTOR, 8)


def test_a_pin_of_something_that_is_not_there() -> None:
    nobody = ModelStage("critic", Stage.TRAINING)
    with pytest.raises(SettingsError, match="critic/training is pinned but is not part of the job"):
        candidates(problem(Capabilities(pins={nobody: Pin(tp=1)})), ACTOR, 8)
