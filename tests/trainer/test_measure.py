"""Metrics and observations of a step whose numbers are known."""

from __future__ import annotations

import numpy as np
import pytest

from nereus.core import Boundary, Lengths, Timing
from nereus.trainer import measure
from nereus.trainer.calls import Accounts
from nereus.trainer.table import SampleTable
from tests.trainer.world import config

FACTS = {"devices": frozenset({0, 1}), "peaks": {0: 5}, "step_s": 2.0}


def table() -> SampleTable:
    made = SampleTable(1, np.arange(4, dtype=np.int64))
    made.set_tokens("prompt", [[1, 4, 3]] * 4)
    made.set_tokens("response", [[4], [4, 5], [4, 5, 6], [7, 8, 9]])
    made.columns |= {
        "rewards": np.array([0.0, 1.0, 1.0, 2.0]),
        "verifier_scores": np.array([0.0, 0.0, 0.0, 1.0]),
        "reward_scores": np.array([3.0, 3.0, 3.0, 5.0]),
        "stat/actor/kl": np.array(0.25),
    }
    return made


def accounts() -> Accounts:
    made = Accounts()
    for device, seconds in ((0, 1.0), (1, 3.0)):
        made.add_timings("generate", device, {"decode": seconds, "tp": 0.5})
    made.add_timings("generate", 1, {"decode": 1.0})
    for loss in (1.0, 2.0):
        made.add_sums("update_actor", {"pg_loss": loss, "mini_batches": 1.0})
    return made


def test_metrics_have_the_names_and_values_of_the_step() -> None:
    found = measure.metrics(config(), table(), accounts(), {"generate": 0.5, "adv": 0.1, "sync": 0.2}, 2.0)
    assert found == {
        "response_length/mean": 2.25,
        "response_length/max": 3.0,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 3.0,
        "critic/rewards/mean": 1.0,
        "critic/score/mean": 3.5,
        "verifier/mean": 0.25,
        "perf/time_per_step": 2.0,
        "perf/total_num_tokens": 21.0,
        "perf/throughput": 10.5,
        "timing_s/step": 2.0,
        "timing_s/gen": 0.5,
        "timing_s/adv": 0.1,
        "timing_s/sync": 0.2,
        "actor/kl": 0.25,
        "actor/pg_loss": 1.5,
        "actor/lr": pytest.approx(0.5 * 3 / 8),
        "critic/lr": 0.25,
    }


def test_an_observation_has_the_lengths_and_the_busiest_device_of_each_call() -> None:
    seen = measure.observation(Boundary(2, 9.0), table(), accounts(), {"generate": 0.5}, **FACTS)
    assert seen.response == Lengths.measured([1, 2, 3, 3])
    assert seen.prompt == Lengths.measured([3] * 4)
    assert seen.update_tokens == 9
    assert seen.timings == {"generate:decode": Timing(4.0, 1), "generate:tp": Timing(0.5, 1)}
    assert (seen.devices, seen.peaks, seen.step_s) == (FACTS["devices"], FACTS["peaks"], 2.0)


def test_a_step_that_ended_before_generation_has_no_response_lengths() -> None:
    made = SampleTable(1, np.arange(1, dtype=np.int64))
    made.set_tokens("prompt", [[1, 4, 3]])
    seen = measure.observation(Boundary(2, 9.0), made, Accounts(), {}, **FACTS, out_of_memory="device 0: no")
    assert (seen.response, seen.prompt, seen.out_of_memory) == (None, Lengths.measured([3]), "device 0: no")
