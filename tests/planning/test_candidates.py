"""Which candidates are legal, and why others are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nereus.core import Candidate, Capabilities, ModelStage, Pin, Rejection, SettingsError, Stage
from nereus.planning.grid import EXACT_POOL, Grids, candidates
from nereus.planning.problem import Problem
from nereus.planning.search import search
from tests.cost.jobs import ACTOR, GENERATION, REFERENCE, SMALL, TINY, WORKLOAD, cluster, grpo


def problem(able: Capabilities | None = None, devices: int = 8, **changes: Any) -> Problem:
    return Problem(grpo(SMALL), replace(WORKLOAD, **changes), cluster(devices), able or Capabilities())


def all_legal(asked: Problem, model_stage: ModelStage, pool: int) -> tuple[list[Candidate], tuple[Rejection, ...]]:
    grids = Grids(asked, (pool,))
    grid = grids.of(model_stage)
    return [grid.candidate(row) for row in range(len(grid.rows))], grids.refusals.all()


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
    asked = problem(Capabilities(dp="powers"))
    assert {c.dp for c in all_legal(asked, ACTOR, 8)[0] if c.layout.size == 1} == {1, 2, 4}


def test_model_stages_that_are_not_trained_share_out_the_whole_batch() -> None:
    found, refused = all_legal(problem(), REFERENCE, 10)
    assert {c.dp for c in found if c.layout.size == 1} == set(range(1, 9))
    assert any(r.plan == "reference/inference dp9" and "the batch has 8 sequences" in r.reason for r in refused)


def test_on_large_pools_replicas_that_do_not_shrink_a_share_are_left_out() -> None:
    able = Capabilities(tp=(1,), pp=(1,), micro_batches=(1,), recompute=("none",))
    found, _ = all_legal(problem(able, prompts=200, samples_per_prompt=1, mini_batch=200), ACTOR, 200)
    assert [c.dp for c in found if c.dp <= EXACT_POOL] == list(range(1, EXACT_POOL + 1))
    shares = [-(-200 // c.dp) for c in found if c.dp > EXACT_POOL]
    assert shares == sorted(set(shares), reverse=True)
    assert {-(-200 // c.dp) for c in found} == {-(-200 // dp) for dp in range(1, 201)}


@pytest.mark.parametrize("replicas", ["any", "powers"])
@pytest.mark.parametrize("pools", [((7,), (7, 7)), ((8,) * 8, (8,) * 9), ((8, 7), (8, 8)), ((70,), (71,))])
def test_a_larger_pool_has_every_candidate_of_a_smaller_one(
    replicas: str, pools: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    spec = replace(SMALL, layers=14)
    able = Capabilities(dp=replicas, micro_batches=(1,), recompute=("none",))
    workload = replace(WORKLOAD, prompts=120, samples_per_prompt=1, mini_batch=120)
    asked = Problem(grpo(spec), workload, cluster(1), able)
    for model_stage in asked.workflow.model_stages:
        fewer, more = (set(candidates(asked, model_stage, pool)) for pool in pools)
        assert fewer <= more


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
    found = all_legal(problem(prompts=6), GENERATION, 1)[0]
    assert sorted((c.micro_batch, c.kv_bytes > 0) for c in found) == [
        (1, True), (2, True), (4, True), (8, True), (12, False),
    ]  # fmt: skip
    one = next(c.kv_bytes for c in found if c.micro_batch == 1)
    assert all(c.kv_bytes == c.micro_batch * one for c in found if c.kv_bytes)


def test_capabilities_bound_the_degrees() -> None:
    found, _ = all_legal(problem(Capabilities(tp=(1, 4), max_tp=2, max_pp=3)), ACTOR, 8)
    assert {c.layout.tp for c in found} == {1}
    assert {c.layout.pp for c in found} == {1, 2, 3}


def test_options_are_looked_at_only_where_the_job_can_do_them() -> None:
    plain = all_legal(problem(), ACTOR, 4)[0]
    assert {(c.zero, c.cp, c.ep, c.vpp, c.offload, c.sequence_parallel) for c in plain} == {(0, 1, 1, 1, False, False)}
    able = Capabilities(zero=(0, 1), cp=(1, 2), vpp=(1, 2), offload=True, sequence_parallel=True)
    found = all_legal(problem(able), ACTOR, 4)[0]
    assert {c.zero for c in found if c.dp * c.cp > 1} == {0, 1}
    assert {c.zero for c in found if c.dp * c.cp == 1} == {0}
    assert {c.cp for c in found} == {1, 2}
    assert {c.vpp for c in found if c.layout.pp > 1} == {1, 2}
    assert {c.vpp for c in found if c.layout.pp == 1} == {1}
    assert {c.offload for c in found} == {False, True}
    assert all(c.sequence_parallel == (c.layout.tp > 1) for c in found)


def test_refusals_are_counted_and_name_a_few() -> None:
    asked = Problem(grpo(SMALL), WORKLOAD, cluster(2, 26 * 10**6), Capabilities())
    refused = search(asked).refused
    memory = [r for r in refused if "does not fit in memory, even alone" in r.reason]
    assert 1 <= len(memory) <= 3
    assert sum(r.count for r in memory) > len(memory)


def test_labels_tell_rows_apart() -> None:
    able = Capabilities(zero=(0, 1), cp=(1, 2), vpp=(1, 2), offload=True)
    grid = Grids(problem(able), (4,)).of(ACTOR)
    labels = [grid.label(row) for row in range(len(grid.rows))]
    assert len(set(labels)) == len(labels) == len({grid.candidate(row) for row in range(len(grid.rows))})


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
        search(problem(Capabilities(pins={ACTOR: pin})))


def test_a_pin_of_something_that_is_not_there() -> None:
    nobody = ModelStage("critic", Stage.TRAINING)
    with pytest.raises(SettingsError, match="critic/training is pinned but is not part of the job"):
        search(problem(Capabilities(pins={nobody: Pin(tp=1)})))
