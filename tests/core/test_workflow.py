"""Workflows, workloads and lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import Call, Lengths, SettingsError, Work, Workflow, Workload
from tests.core.values import ACTOR_GENERATION, ACTOR_TRAINING, REWARD_INFERENCE, SPEC

GENERATE = Call("generate", ACTOR_GENERATION, Work.GENERATE, ("prompts",), ("responses",))
SCORE = Call("score", REWARD_INFERENCE, Work.FORWARD, ("responses",), ("scores",))
OLD = Call("old_log_probs", ACTOR_TRAINING, Work.FORWARD, ("responses",), ("old_log_probs",))
UPDATE = Call("update", ACTOR_TRAINING, Work.UPDATE, ("scores",))
SPECS = {"actor": SPEC, "reward": SPEC}


def test_calls_wait_for_their_data_and_updates_for_the_rest_of_their_unit() -> None:
    flow = Workflow((UPDATE, OLD, SCORE, GENERATE), SPECS)
    assert set(flow.edges()) == {
        ("generate", "score"),
        ("generate", "old_log_probs"),
        ("score", "update"),
        ("old_log_probs", "update"),
    }
    order = flow.order()
    assert all(order.index(earlier) < order.index(later) for earlier, later in flow.edges())


def test_calls_that_wait_for_each_other_are_refused() -> None:
    score = Call("score", REWARD_INFERENCE, Work.FORWARD, ("log_probs",), ("scores",))
    log_probs = Call("log_probs", ACTOR_TRAINING, Work.FORWARD, ("scores",), ("log_probs",))
    with pytest.raises(SettingsError, match="wait for each other"):
        Workflow((score, log_probs), SPECS)


def test_repeated_names_and_missing_specs_are_refused() -> None:
    with pytest.raises(SettingsError, match="names repeat"):
        Workflow((GENERATE, GENERATE), SPECS)
    with pytest.raises(SettingsError, match="no spec for reward"):
        Workflow((SCORE,), {"actor": SPEC})


def test_only_training_model_stages_can_be_updated() -> None:
    with pytest.raises(SettingsError, match="only training"):
        Workflow((Call("update", REWARD_INFERENCE, Work.UPDATE, ()),), SPECS)


def test_a_model_stage_is_updated_when_any_of_its_calls_is_an_update() -> None:
    flow = Workflow((GENERATE, SCORE, OLD, UPDATE), SPECS)
    assert [flow.updated(ms) for ms in flow.model_stages] == [False, False, True]
    assert flow.calls_of(ACTOR_TRAINING) == (OLD, UPDATE)


def workload(prompts: int = 8, samples: int = 4, mini_batch: int = 16, epochs: int = 2) -> Workload:
    return Workload(prompts, samples, Lengths.constant(3), Lengths.constant(9), mini_batch, 9, epochs)


def test_updates_are_mini_batches_times_epochs() -> None:
    assert (workload().sequences, workload().updates) == (32, 4)


def test_a_mini_batch_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"mini_batch 12 does not divide the batch of 32 sequences \(8 prompts x 4"):
        workload(mini_batch=12)


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(SettingsError, match="prompts is 0"):
        workload(prompts=0)


@pytest.mark.parametrize("numbers", [(5, 3, 4), (-1, 0, 4), (2, 9, 4)])
def test_lengths_refuse_numbers_that_no_distribution_has(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(SettingsError, match="lengths"):
        Lengths(*numbers)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=200))
def test_measured_lengths_are_those_of_the_sample(sample: list[int]) -> None:
    lengths = Lengths.measured(sample)
    assert lengths.maximum == max(sample)
    assert lengths.mean == pytest.approx(sum(sample) / len(sample))
    assert lengths.quantiles[0] == min(sample)
    assert list(lengths.quantiles) == sorted(lengths.quantiles)
    assert sum(value <= lengths.p95 for value in sample) >= 0.9 * len(sample)
