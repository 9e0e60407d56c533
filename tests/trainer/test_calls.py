"""What the coordinator sends for each call and what it makes of the answers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nereus.core import LogicalState, ModelStage, Plan, WorkerLostError, expand
from nereus.engine.connection import Message
from nereus.trainer import dispatch
from nereus.trainer.calls import Accounts, Calls
from nereus.trainer.table import SampleTable, mini_batches
from tests.trainer.fake_crew import FakeCrew, imitate
from tests.trainer.world import config, plan

ACTOR = ModelStage.parse("actor/training")
FIRST_ID = 28


class World:
    """Calls on a table of one step under a plan."""

    def __init__(self, under: Plan, samples: int = 14) -> None:
        self.config = config()
        self.workflow = self.config.algorithm.workflow(self.config.specs)
        self.crew = FakeCrew(imitate)
        self.logical = {ms: LogicalState() for ms in self.workflow.model_stages}
        self.accounts = Accounts()
        units = expand(under)
        self.calls = Calls(self.config, self.crew, under, units.of, self.logical, self.accounts)
        self.table = SampleTable(2, np.arange(FIRST_ID, FIRST_ID + samples, dtype=np.int64))
        self.table.set_tokens("prompt", [[1, 4 + row % 10, 3] for row in range(samples)])

    def run(self, name: str) -> None:
        call = self.workflow.call(name)
        task = dispatch.Task(name, frozenset(), frozenset(), lambda: self.calls.routine(call, self.table))
        dispatch.run(self.crew, [task], 5.0, poll_s=0.0)

    def updated(self, name: str = "update_actor") -> Iterator[tuple[int, Message]]:
        """The columns an update reads, then the update; its prepare commands."""
        self.run("generate")
        shape = self.table.mask().shape
        for column in ("old_log_probs", "advantages", "returns"):
            self.table.columns[column] = np.arange(shape[0] * shape[1], dtype=np.float64).reshape(shape)
        self.table.columns["response_mask"] = self.table.mask()
        self.run(name)
        yield from self.crew.commands("update.prepare")


def test_generation_is_shared_out_in_unit_order_with_the_ids_of_the_samples() -> None:
    world = World(plan({"actor/generation": (1, 1, 3, (2, 0, 1))}))
    world.run("generate")
    sent = world.crew.commands("generate")
    assert [(d, message.arrays["sample_ids"].tolist()) for d, message in sent] == [
        (0, list(range(28, 33))),
        (1, list(range(33, 38))),
        (2, list(range(38, 42))),
    ], "units are ordered by first device, larger shares first"
    assert world.table.tokens("response", np.arange(14)) == [[i + 4] * (i % 3 + 1) for i in range(28, 42)]
    assert world.table.done == {"generate"}


def test_units_without_a_share_are_left_alone() -> None:
    world = World(plan({"actor/generation": (1, 1, 4, (0, 1, 2, 3))}), samples=3)
    world.run("generate")
    assert [device for device, _ in world.crew.commands("generate")] == [0, 1, 2]
    assert len(world.table.tokens("response", np.arange(3))) == 3


@pytest.mark.parametrize(("call", "column"), [("reference_log_probs", "reference_log_probs"), ("values", "values")])
def test_answers_of_all_units_become_one_column_in_sample_order(call: str, column: str) -> None:
    world = World(plan({"reference/inference": (1, 1, 3, (3, 1, 2)), "critic/training": (2, 1, 2, (4, 5, 6, 7))}))
    world.run("generate")
    world.run(call)
    assert world.table.columns[column].shape == world.table.mask().shape
    assert world.table.columns[column][:, 0].tolist() == [float(i + 4) for i in range(28, 42)]


def test_one_score_a_sample() -> None:
    world = World(plan())
    world.run("generate")
    world.run("reward_scores")
    assert world.table.columns["reward_scores"].tolist() == [float(i + 4) for i in range(28, 42)]


def test_every_mini_batch_is_shared_out_whole_and_once() -> None:
    world = World(plan())
    sent = list(world.updated())
    assert [len(message.arrays["response_lengths"]) for _, message in sent] == [4, 3, 4, 3]
    got = np.concatenate([message.arrays["advantages"] for _, message in sent])
    rows = np.concatenate(mini_batches(11, 2, 14, 7, 1))
    assert np.array_equal(got, world.table.columns["advantages"][rows])


def test_every_unit_is_told_the_scale_of_the_whole_mini_batch() -> None:
    world = World(plan())
    sent = list(world.updated())
    lengths = world.table.columns["response_lengths"]
    for number, rows in enumerate(mini_batches(11, 2, 14, 7, 1)):
        scales = [message.fields["scale"] for _, message in sent if message.fields["update"] == number]
        assert scales == pytest.approx([1 / lengths[rows].sum()] * 2)


def test_reported_sums_are_divided_like_the_loss() -> None:
    world = World(plan())
    scales = {message.fields["update"]: message.fields["scale"] for _, message in world.updated()}
    sums = world.accounts.sums["update_actor"]
    assert sums["pg_loss"] == pytest.approx(2 * scales[0] + 2 * scales[1]), "two units report 1 in each mini-batch"
    assert (sums["grad_norm"], sums["mini_batches"]) == (4.0, 2.0)


def test_a_commit_follows_when_every_unit_is_ready() -> None:
    world = World(plan())
    list(world.updated())
    steps = [(m.name, m.fields["update"]) for _, m in world.crew.sent if m.name.startswith("update.")]
    once = [("update.prepare", 0)] * 2 + [("update.commit", 0)] * 2
    assert steps == once + [(name, 1) for name, _ in once]
    assert world.logical[ACTOR] == LogicalState(update_count=2, model_version=1, position=FIRST_ID + 14)
    assert world.table.updates == {"update_actor": 2}


def test_an_update_counts_from_its_commit_on_even_if_nobody_confirms_it() -> None:
    world = World(plan())

    def lost(device: int, message: Message) -> Message | WorkerLostError:
        gone = message.name == "update.commit" and device == 1
        return WorkerLostError(1, "it was killed") if gone else imitate(device, message)

    world.crew.answer = lost
    with pytest.raises(WorkerLostError):
        list(world.updated())
    assert world.logical[ACTOR].update_count == world.table.updates["update_actor"] == 1


@pytest.mark.parametrize("made", [1, 2])
def test_an_interrupted_update_goes_on_with_its_next_mini_batch(made: int) -> None:
    world = World(plan())
    world.table.updates["update_actor"] = made
    sent = list(world.updated())
    got = [message.arrays["advantages"] for _, message in sent]
    rows = np.concatenate([np.arange(0), *mini_batches(11, 2, 14, 7, 1)[made:]])
    assert np.array_equal(np.concatenate([*got, np.empty((0, 3))]), world.table.columns["advantages"][rows])
    assert "update_actor" in world.table.done


def test_seconds_of_workers_are_kept_by_call_device_and_class() -> None:
    world = World(plan())
    world.run("generate")
    world.run("reference_log_probs")
    assert world.accounts.timings == {
        "generate": {0: {"forward": 1.0}, 1: {"forward": 1.0}},
        "reference_log_probs": {0: {"forward": 1.0}},
    }
