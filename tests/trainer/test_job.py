"""The coordinator of a job on imitated workers: order of samples, early ends, what is adopted, what is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nereus.clusters.local import Local
from nereus.core import (
    EMU,
    Boundary,
    EMUSet,
    Layout,
    ModelStage,
    OutOfMemoryError,
    Partition,
    TransitionError,
    WorkerLostError,
    expand,
)
from nereus.engine.connection import Message
from nereus.engine.crew import Reply
from nereus.trainer import checkpoint
from nereus.trainer.job import MAX_MEMORY_EVENTS, RLJob, realised
from nereus.trainer.table import mini_batches
from tests.trainer.fake_crew import FakeCrew, imitate
from tests.trainer.world import job, plan

ACTOR = ModelStage.parse("actor/training")
CRITIC = ModelStage.parse("critic/training")


def crew_of(made: RLJob) -> FakeCrew:
    assert isinstance(made.crew, FakeCrew)
    return made.crew


def generated_ids(made: RLJob) -> list[int]:
    return [int(i) for _, m in crew_of(made).commands("generate") for i in m.arrays["sample_ids"]]


def failing(command: str, which: Callable[[Message], bool], error: OutOfMemoryError) -> FakeCrew:
    """A crew on which the first command that fits fails once, on every device."""
    left = [True]

    def answer(device: int, message: Message) -> Reply:
        if left[0] and message.name == command and which(message) and device == error.device:
            left[0] = False
            return error
        return imitate(device, message)

    return FakeCrew(answer, range(4))


def out_of_memory(device: int) -> OutOfMemoryError:
    return OutOfMemoryError(device, 80, 40, 100, "activations")


def test_sample_ids_are_used_once_each_and_in_order(tmp_path: Path) -> None:
    made = job(tmp_path)
    for boundary in made.boundaries():
        assert made.table is not None
        assert made.table.sample_ids.tolist() == list(range(14 * (boundary.step - 1), 14 * boundary.step))
    assert generated_ids(made) == list(range(3 * 14))
    assert (made.step, made.position) == (3, 42)


def test_updates_use_every_sample_of_every_step_once(tmp_path: Path) -> None:
    made = job(tmp_path)
    for boundary in made.boundaries():
        assert made.table is not None
        sent = [m for _, m in crew_of(made).commands("update.prepare") if m.fields["call"] == "update_actor"]
        rows = np.concatenate(mini_batches(11, boundary.step - 1, 14, 7, 1))
        got = np.concatenate([m.arrays["advantages"] for m in sent])
        assert np.array_equal(got, made.table.columns["advantages"][rows])
        crew_of(made).sent.clear()


def test_forward_calls_come_first_and_synchronisation_last(tmp_path: Path) -> None:
    made = job(tmp_path, steps=1)
    list(made.boundaries())
    names = [m.name for _, m in crew_of(made).sent if m.name in ("generate", "forward", "update.prepare", "sync")]
    assert names == sorted(names, key=("generate", "forward", "update.prepare", "sync").index)
    assert {m.fields["version"] for _, m in crew_of(made).commands("sync")} == {2}


class SlowCritic(FakeCrew):
    """The critic's workers answer no update before weights have been synchronised."""

    def __init__(self) -> None:
        super().__init__(imitate, range(4))

    def poll(self, timeout_s: float) -> list[tuple[int, Reply]]:
        held = {}
        if len(self.commands("sync")) < 2:
            for device, queue in self.queues.items():
                if any(message.fields.get("call") == "update_critic" for _, message in queue):
                    held[device], self.queues[device] = queue, deque()
        try:
            return super().poll(timeout_s)
        finally:
            self.queues |= held


def test_weights_are_synchronised_while_a_critic_of_other_devices_is_still_updated(tmp_path: Path) -> None:
    made = job(tmp_path, SlowCritic(), steps=1)
    (boundary,) = made.boundaries()
    assert boundary.step == 1
    assert {device for device, _ in crew_of(made).commands("sync")} == {0, 1}, "nobody else takes part"


class Overlapping(FakeCrew):
    """Notes which calls were under way when a forward call was sent."""

    def __init__(self) -> None:
        super().__init__(imitate, range(4))
        self.beside: dict[str, set[str]] = {}

    def submit(self, device: int, message: Message) -> int:
        if message.name == "forward":
            waiting = (m for queue in self.queues.values() for _, m in queue if m.name == "forward")
            self.beside.setdefault(message.fields["call"], set()).update(m.fields["call"] for m in waiting)
        return super().submit(device, message)


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_partition_runs_one_stage_at_a_time(partitioned: bool, tmp_path: Path) -> None:
    """The critic has its own devices: values are computed beside inference, unless one partition holds both."""
    crew = Overlapping()
    made = job(tmp_path, crew, steps=1)
    if partitioned:
        whole = Partition(frozenset(made.plan.model_stages), frozenset(range(4)))
        made.plan = replace(made.plan, partitions=(whole,))
    list(made.boundaries())
    beside = crew.beside["values"] & {"reference_log_probs", "reward_scores"}
    assert beside == (set() if partitioned else {"reference_log_probs", "reward_scores"})


def test_an_early_end_has_the_boundary_of_the_step_before_and_says_why(tmp_path: Path) -> None:
    crew = failing("update.prepare", lambda m: m.fields["call"] == "update_actor", out_of_memory(0))
    made = job(tmp_path, crew)
    boundary = next(made.boundaries())
    seen = made.observe(boundary)
    assert boundary.step == 0
    assert (seen.out_of_memory, seen.step_s) == (str(out_of_memory(0)), None)
    assert seen.response is not None, "what was generated is known"


@pytest.mark.parametrize("update", [0, 1])
@pytest.mark.parametrize("call", ["update_actor", "update_critic"])
def test_after_an_early_end_the_same_step_goes_on_where_it_stopped(call: str, update: int, tmp_path: Path) -> None:
    """Actor and critic update at the same time, so the other's commit may be under way when one fails."""
    fits = lambda m: m.fields["call"] == call and m.fields["update"] == update  # noqa: E731
    crew = failing("update.prepare", fits, out_of_memory(0 if call == "update_actor" else 3))
    made = job(tmp_path, crew, steps=1)
    boundaries = made.boundaries()
    assert next(boundaries).step == 0
    smaller = plan(micro_batch=1)
    made.adopt(expand(smaller), smaller)
    assert next(boundaries).step == 1
    assert next(boundaries, None) is None
    assert generated_ids(made) == list(range(14)), "nothing is generated again"
    for name in ("update_actor", "update_critic"):
        commits = [m.fields["update"] for _, m in crew.commands("update.commit") if m.fields["call"] == name]
        assert sorted(commits) == [0, 0, 1, 1], f"{name}: on both devices each mini-batch once"
    assert made.logical[ACTOR].update_count == made.logical[CRITIC].update_count == 2
    last = [m.fields["micro_batch"] for _, m in crew.commands("update.prepare")][-1]
    assert last == 1


def test_out_of_memory_ends_the_run_when_nothing_is_adopted(tmp_path: Path) -> None:
    made = job(tmp_path, failing("generate", lambda _: True, out_of_memory(1)))
    with pytest.raises(OutOfMemoryError, match="device 1"):
        list(made.boundaries())


def test_plans_that_run_out_of_memory_in_turns_end_the_run(tmp_path: Path) -> None:
    def answer(device: int, message: Message) -> Reply:
        return out_of_memory(1) if message.name == "generate" and device == 1 else imitate(device, message)

    made = job(tmp_path, FakeCrew(answer, range(4)))

    def run() -> None:
        for number, _ in enumerate(made.boundaries()):
            assert number <= MAX_MEMORY_EVENTS, "the job goes from plan to plan for ever"
            made.adopt(made.units, plan(micro_batch=1 + number % 2))

    with pytest.raises(OutOfMemoryError, match="device 1"):
        run()


def test_out_of_memory_ends_the_run_when_a_transition_came_to_nothing(tmp_path: Path) -> None:
    made = job(tmp_path, failing("generate", lambda _: True, out_of_memory(1)))
    boundaries = made.boundaries()
    next(boundaries)
    made.adopt(made.units)
    with pytest.raises(OutOfMemoryError, match="device 1"):
        next(boundaries)


def test_an_event_during_evaluation_leaves_the_step_finished(tmp_path: Path) -> None:
    crew = failing("generate", lambda m: m.fields["seed"] is not None, out_of_memory(1))
    made = job(tmp_path, crew, steps=2, evaluate_every=1, evaluate_samples=4)
    boundaries = made.boundaries()
    assert next(boundaries).step == 1
    assert "val/score" not in made.metrics
    made.adopt(expand(plan(micro_batch=1)), plan(micro_batch=1))
    assert next(boundaries).step == 2
    assert made.metrics["val/score"] >= 0


def test_a_stopped_transition_makes_every_group_again_for_the_units_that_are_left(tmp_path: Path) -> None:
    made = job(tmp_path)
    next(made.boundaries())
    crew = crew_of(made)
    crew.sent.clear()
    others = [unit for unit in made.units if unit.model_stage != ACTOR]
    left = EMUSet((*others, EMU(ACTOR, Layout(2), (2, 3))))
    made.adopt(left)
    assert made.plan == realised(made.plan, left)
    candidate = made.plan.of(ACTOR).candidate
    assert (candidate.layout, candidate.dp, candidate.micro_batch) == (Layout(2), 1, 2)
    order = [m.name for _, m in crew.sent]
    assert order.index("groups.reset") < order.index("groups.make") < order.index("bind")
    assert {device for device, _ in crew.commands("groups.reset")} == {0, 1, 2, 3}
    members = {tuple(group) for _, m in crew.commands("groups.make") for _, group in m.fields["groups"]}
    assert members == {(2, 3), (0, 1, 2, 3)}, "tp of actor and critic, synchronisation"


def test_a_completed_transition_keeps_the_groups_of_units_that_stay(tmp_path: Path) -> None:
    made = job(tmp_path)
    next(made.boundaries())
    crew_of(made).sent.clear()
    goal = plan({"reward/inference": (1, 1, 1, (3,))})
    made.adopt(expand(goal), goal)
    assert made.plan == goal
    assert not crew_of(made).commands("groups.reset")
    assert not crew_of(made).commands("groups.make")


def test_a_worker_lost_in_a_transition_ends_the_run_with_the_units_that_are_left(tmp_path: Path) -> None:
    crew = FakeCrew(imitate, range(4))
    made = job(tmp_path, crew)
    crew.dead.add(1)
    crew._lost[1] = WorkerLostError(1, "it was killed")
    left = made.units.without_devices({1})
    with pytest.raises(WorkerLostError, match="device 1"):
        made.adopt(left)
    assert made.units == left


def test_a_worker_that_died_between_steps_is_reported_and_not_replaced(tmp_path: Path) -> None:
    crew = FakeCrew(imitate, range(4))
    made = job(tmp_path, crew)
    crew.dead.add(2)
    crew._lost[2] = WorkerLostError(2, "it was killed")
    with pytest.raises(WorkerLostError, match="device 2"):
        made.observe(Boundary(0, 0.0))


def test_units_of_a_missing_model_stage_are_refused(tmp_path: Path) -> None:
    made = job(tmp_path)
    with pytest.raises(TransitionError, match="no unit is left of critic/training"):
        made.adopt(EMUSet(tuple(unit for unit in made.units if unit.model_stage != CRITIC)))


def test_a_checkpoint_takes_a_unit_whose_workers_live(tmp_path: Path) -> None:
    crew = FakeCrew(imitate, range(4))
    made = job(tmp_path, crew)
    crew.dead.add(0)
    path = made.checkpoint()
    assert checkpoint_units(crew) == {ACTOR: (1,), CRITIC: (2, 3)}
    assert path.parent == tmp_path / "checkpoints"


def test_a_model_without_a_whole_unit_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    crew = FakeCrew(imitate, range(4))
    made = job(tmp_path, crew)
    crew.dead.add(3)
    with pytest.raises(TransitionError, match=r"no whole unit of critic/training is left, .* lost with device 3"):
        made.checkpoint()
    assert not (tmp_path / "checkpoints").exists()


def test_devices_that_leave_while_in_use_leave_a_checkpoint_once(tmp_path: Path) -> None:
    made = job(tmp_path)
    made.source = Local(3, "1 GiB", oversubscribe=True)  # device 3 holds half of the critic
    for _ in made.boundaries():
        pass
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-1"]


def test_only_an_unfinished_step_leaves_its_table_in_a_checkpoint(tmp_path: Path) -> None:
    made = job(tmp_path)
    next(made.boundaries())
    assert checkpoint.read_table(made.checkpoint()) is None, "resuming would count its samples twice"
    early = job(tmp_path / "early", failing("generate", lambda _: True, out_of_memory(1)))
    next(early.boundaries())
    table = checkpoint.read_table(early.checkpoint())
    assert table is not None
    assert table.sample_ids.tolist() == list(range(14))


def checkpoint_units(crew: FakeCrew) -> dict[ModelStage, tuple[int, ...]]:
    found: dict[ModelStage, tuple[int, ...]] = {}
    for device, message in crew.commands("checkpoint"):
        unit: EMU = message.fields["unit"]
        found[unit.model_stage] = (*found.get(unit.model_stage, ()), device)
    return found
