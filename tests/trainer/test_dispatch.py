"""Disjoint tasks overlap, those on shared devices take turns, and errors are explained once nothing is under way."""

# ruff: noqa: ARG002
from __future__ import annotations

from collections.abc import Collection, Iterable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import NereusError, OutOfMemoryError, TransportError, WorkerLostError
from nereus.engine.connection import Message
from nereus.engine.crew import LEAST_GRACE_S, Reply, grace_s
from nereus.trainer import dispatch
from nereus.trainer.dispatch import Routine, Task
from tests.trainer.fake_crew import FakeCrew

BROKEN = TransportError("the peer is gone")


class Bench:
    """Tasks that send `commands` commands one after another to all their devices, and a diary of what they did."""

    def __init__(self, crew: FakeCrew) -> None:
        self.crew = crew
        self.diary: list[str] = []
        self.running: dict[str, frozenset[int]] = {}

    def task(self, name: str, devices: Iterable[int], after: Iterable[str] = (), commands: int = 2) -> Task:
        mine = frozenset(devices)

        def routine() -> Routine:
            assert not any(mine & others for others in self.running.values()), "two tasks share a device"
            self.running[name] = mine
            self.diary.append(f"{name} starts")
            for number in range(commands):
                replies = yield {self.crew.submit(device, Message(f"{name}{number}")) for device in mine}
                assert {reply.name for reply in replies.values()} == {f"{name}{number}"}
            del self.running[name]
            self.diary.append(f"{name} ends")

        return Task(name, mine, frozenset(after), routine)


def run(crew: FakeCrew, *tasks: Task, timeout_s: float = 5.0) -> dict[str, float]:
    return dispatch.run(crew, tasks, timeout_s, poll_s=0.0)


def test_tasks_on_disjoint_devices_overlap() -> None:
    bench = Bench(FakeCrew())
    seconds = run(bench.crew, bench.task("a", [0, 1]), bench.task("b", [2]))
    assert bench.diary[:2] == ["a starts", "b starts"]
    assert set(seconds) == {"a", "b"}


def test_tasks_on_a_shared_device_take_turns_in_order() -> None:
    bench = Bench(FakeCrew())
    run(bench.crew, bench.task("a", [0, 1]), bench.task("b", [1, 2]), bench.task("c", [2, 3]))
    assert bench.diary == ["a starts", "a ends", "b starts", "b ends", "c starts", "c ends"], "c must not overtake b"


def test_a_task_waits_for_those_it_names_and_not_for_ones_done_before() -> None:
    bench = Bench(FakeCrew())
    run(bench.crew, bench.task("b", [1], ["a"]), bench.task("a", [0], ["of an earlier round"]))
    assert bench.diary == ["a starts", "a ends", "b starts", "b ends"]


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 5), min_size=1, max_size=4), st.sets(st.integers(0, 6)), st.integers(0, 3)),
        min_size=1,
        max_size=7,
    )
)
def test_any_tasks_run_once_each_after_what_they_wait_for(shapes: list[tuple[set[int], set[int], int]]) -> None:
    bench = Bench(FakeCrew())
    tasks = [
        bench.task(f"t{index}", devices, [f"t{other}" for other in after if other < index], commands)
        for index, (devices, after, commands) in enumerate(shapes)
    ]
    seconds = run(bench.crew, *tasks)
    assert set(seconds) == {task.name for task in tasks}
    assert sorted(bench.diary) == sorted(f"{task.name} {what}" for task in tasks for what in ("starts", "ends"))
    for task in tasks:
        for before in task.after:
            assert bench.diary.index(f"{before} ends") < bench.diary.index(f"{task.name} starts")


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ({0: BROKEN, 1: OutOfMemoryError(1, 8, 4, 10, "gradients"), 2: BROKEN}, OutOfMemoryError),
        ({0: OutOfMemoryError(0, 8, 4, 10, "gradients"), 2: WorkerLostError(2, "it was killed")}, WorkerLostError),
        ({1: BROKEN, 2: NereusError("a bug")}, NereusError),
        ({1: BROKEN}, TransportError),
    ],
)
def test_the_error_that_explains_the_others_is_raised_once_nothing_is_outstanding(
    errors: dict[int, NereusError], raised: type[NereusError]
) -> None:
    def answer(device: int, message: Message) -> Reply:
        # Device 0 answers first, the others one poll later: their errors are still to come when the first is seen.
        return errors.get(device, Message(message.name)) if message.name != "groups.reset" else Message(message.name)

    crew = FakeCrew(answer)
    bench = Bench(crew)
    for device in (1, 2):
        crew.submit(device, Message("what they were at before"))
    with pytest.raises(NereusError) as caught:
        run(crew, bench.task("a", [0, 1]), bench.task("b", [2]), bench.task("c", [3], commands=9))
    assert type(caught.value) is raised
    assert crew.outstanding() == 0
    assert {device for device, _ in crew.commands("groups.reset")} == crew.devices, "idle members free their peers"


def test_a_worker_that_cannot_be_sent_to_is_an_error_of_the_same_kind() -> None:
    crew = FakeCrew()
    crew.dead.add(3)
    bench = Bench(crew)
    with pytest.raises(WorkerLostError, match="device 3"):
        run(crew, bench.task("a", [0], commands=3), bench.task("b", [3]))
    assert crew.outstanding() == 0


class Stopped(FakeCrew):
    """Device 1 answers nothing; those that wait for it fail after `timeout_s` on a clock that only polling moves."""

    def __init__(self, waiting: Collection[int], timeout_s: float) -> None:
        super().__init__()
        self.now_s, self.waiting, self.timeout_s = 100.0, waiting, timeout_s
        self.ended: list[int] = []

    def monotonic(self) -> float:
        return self.now_s

    def poll(self, timeout_s: float) -> list[tuple[int, Reply]]:
        self.now_s += 0.05
        late = self.now_s > 100.0 + self.timeout_s
        found: list[tuple[int, Reply]] = []
        for device, queue in self.queues.items():
            while queue and device != 1 and (late or device not in self.waiting):
                ticket, message = queue.popleft()
                found.append((ticket, BROKEN if device in self.waiting else Message(message.name)))
        return found

    def settle(self, devices: Collection[int], timeout_s: float, passed_s: float = 0.0) -> None:
        assert passed_s >= timeout_s + grace_s(timeout_s), "the deadline has passed"
        self.ended += [device for device in sorted(devices) if self.queues[device]]

    def raise_lost(self) -> None:
        for device in self.ended:
            raise WorkerLostError(device, "no answer within the deadline")


@pytest.mark.parametrize("waiting", [(0,), ()])
def test_a_worker_that_stops_costs_its_deadline_once_is_ended_and_is_the_one_to_be_blamed(
    monkeypatch: pytest.MonkeyPatch, waiting: Collection[int]
) -> None:
    """Its peers notice at their own deadline; where it has none, the coordinator does a little later."""
    crew = Stopped(waiting, 40.0)
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=crew.monotonic, perf_counter=crew.monotonic))
    with pytest.raises(WorkerLostError, match="device 1"):
        run(crew, Bench(crew).task("a", [1, *waiting]), Bench(crew).task("b", [2]), timeout_s=40.0)
    assert crew.ended == [1]
    assert {device for device, _ in crew.commands("groups.reset")} == crew.devices
    assert crew.now_s - 100.0 < 40.0 + grace_s(40.0) + LEAST_GRACE_S + 0.5


def test_silence_past_the_deadline_names_what_was_running(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Stopped):
        def poll(self, timeout_s: float) -> list[tuple[int, Reply]]:
            self.now_s += 0.05
            return []

        def raise_lost(self) -> None:
            return

    crew = Silent((), 1.0)
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=crew.monotonic, perf_counter=crew.monotonic))
    with pytest.raises(TransportError, match="within 1 s while running a, b; see run"):
        run(crew, Bench(crew).task("a", [0]), Bench(crew).task("b", [1]), timeout_s=1.0)
