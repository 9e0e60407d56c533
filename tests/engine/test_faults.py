"""A peer killed, stopped or wrong at each step of a transition: whole units stay, everyone is told, nobody waits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator

import pytest

from nereus.core import (
    EMU,
    Cut,
    Edge,
    EdgeKind,
    EMUSet,
    Kind,
    Layout,
    ModelStage,
    Offload,
    Outcome,
    StateSchema,
    TensorSpec,
    TransitionDAG,
    Where,
)
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.engine.executor import TransitionExecutor
from nereus.engine.worker import DeviceSettings
from nereus.transition.buckets import bucket_bytes
from nereus.transition.budget import Budget
from nereus.transition.compile import connect
from nereus.transition.fit import stored_bytes
from nereus.transition.site import Site
from tests.engine.crews import INFERENCE, PROGRAM, SCHEMAS, TRAINING, WAIT_S, check_state, fill, started, units
from tests.engine.program import Fault

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
VICTIM = 3
ENDS = {
    "Split": (units(TRAINING, Layout(2), (0, 1), (2, 3)), units(TRAINING, Layout(1), (0,), (1,), (2,), (3,))),
    "Extend": (units(TRAINING, Layout(2), (0, 1)), units(TRAINING, Layout(2), (0, 1), (2, 3))),
    "Merge": (units(TRAINING, Layout(1), (0,), (3,)), units(TRAINING, Layout(4), (0, 1, 2, 3))),
    "Destroy": (units(TRAINING, Layout(2), (0, 3)), units(TRAINING, Layout(2), (1, 2))),
}


def transition(kind: str) -> tuple[TransitionDAG, str]:
    """A transition, and the first of its primitives of a kind that the victim takes part in."""
    start, goal = (EMUSet(tuple(found)) for found in ENDS[kind])
    dag = connect(start, goal, SCHEMAS)
    return dag, next(p.id for p in dag.primitives if p.name == kind and VICTIM in p.devices)


def broken(dag: TransitionDAG, fault: Fault, timeout_s: float) -> tuple[Crew, Outcome, float]:
    """The crew after a transition with a fault, what became of it, and how long that took."""
    crew = Crew({d: DeviceSettings() for d in range(4)}, PROGRAM, {"fault": fault}, timeout_s=timeout_s)
    started(crew, range(4))
    fill(crew, dag.start)
    began_s = time.monotonic()
    outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=timeout_s).execute(dag)
    return crew, outcome, time.monotonic() - began_s


def check_survivors(crew: Crew, outcome: Outcome) -> None:
    """Whole units are left, bit for bit, on devices that live; no group; and they go on to another layout."""
    assert not outcome.completed
    assert crew.started() == {0, 1, 2}
    assert outcome.units.of(TRAINING), "a whole copy was there and still is"
    assert VICTIM not in outcome.units.devices
    check_state(crew, outcome.units)
    for reply in crew.call(range(3), Message("groups.names"), WAIT_S).values():
        assert reply.fields["names"] == ()
    again = connect(outcome.units, EMUSet(tuple(units(TRAINING, Layout(1, 3), (2, 1, 0)))), SCHEMAS)
    recovered = TransitionExecutor(crew, SCHEMAS, timeout_s=20).execute(again)
    assert recovered.completed, recovered.error
    check_state(crew, recovered.units)


CASES = {
    "group": ("Merge", "transition.begin", False),
    "probe": ("Merge", "transition.begin", True),
    "receive, Split": ("Split", "transition.apply", False),
    "receive, Extend": ("Extend", "transition.apply", False),
    "receive, Merge": ("Merge", "transition.apply", False),
    "vote": ("Merge", "transition.apply", True),
    "commit": ("Merge", "transition.commit", False),
    "destroy": ("Destroy", "transition.destroy", False),
}


@pytest.mark.parametrize("phase", CASES)
def test_a_peer_killed_at_any_step_leaves_whole_units_and_nobody_waits(phase: str) -> None:
    kind, command, after = CASES[phase]
    dag, primitive = transition(kind)
    fault = Fault(VICTIM, command, primitive if command == "transition.apply" else None, after=after)
    crew, outcome, took_s = broken(dag, fault, 30.0)
    with crew:
        assert took_s < 25, "survivors waited for their deadline"
        assert "device 3 is lost" in str(outcome.error)
        check_survivors(crew, outcome)


@pytest.mark.parametrize("phase", ["group", "receive, Merge", "commit"])
def test_a_peer_that_stops_is_ended_at_its_one_deadline_and_is_the_one_to_be_blamed(phase: str) -> None:
    kind, command, _ = CASES[phase]
    dag, primitive = transition(kind)
    fault = Fault(VICTIM, command, primitive if phase.startswith("receive") else None, signal.SIGSTOP)
    crew, outcome, took_s = broken(dag, fault, 2.0)
    with crew:
        assert took_s < 20
        assert "device 3" in str(outcome.error)
        assert "within 2 s" in str(outcome.error)
        assert not any(f"device {other}" in str(outcome.error) for other in range(3))
        if phase.startswith("receive"):
            assert primitive in str(outcome.error)
        check_survivors(crew, outcome)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_ends_or_stops_while_others_read_it_leaves_whole_units(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for nothing, so it is its memory that is missed, or its last word."""
    start, goal = (
        EMUSet(tuple(units(TRAINING, Layout(1), *each))) for each in (((0,), (3,)), ((0,), (3,), (1,), (2,)))
    )
    dag = connect(start, goal, SCHEMAS)
    assert any(unit.devices == (VICTIM,) for primitive in dag.primitives for unit in primitive.sources)
    with started(Crew({d: DeviceSettings() for d in range(4)}, PROGRAM, timeout_s=2.0), range(4)) as crew:
        fill(crew, start)
        call = crew.call

        def then_lost(devices: Iterable[int], message: Message, timeout_s: float) -> dict[int, Message]:
            replies = call(devices, message, timeout_s)
            if message.name == "transition.begin":
                os.kill(crew.pids()[VICTIM], number)
                time.sleep(0.2)
            return replies

        with monkeypatch.context() as patched:
            patched.setattr(crew, "call", then_lost)
            outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=2.0).execute(dag)
        assert f"device {VICTIM}" in str(outcome.error)
        check_survivors(crew, outcome)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    devices = {device: DeviceSettings() for device in range(4)}
    with Crew(devices, PROGRAM, {"delays": 1}, timeout_s=20) as found:
        yield started(found, range(4))


def emptied(crew: Crew, held: EMUSet) -> None:
    crew.call(range(4), Message("transition.destroy", {"units": list(held)}), WAIT_S)


def test_replicas_that_differ_are_named_before_a_merge(crew: Crew) -> None:
    dag, _ = transition("Merge")
    fill(crew, dag.start)
    key = ("1.norm", Kind.PARAM)
    crew.call([3], Message("spoil", {"key": key}), WAIT_S)
    outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=20).execute(dag)
    assert "copies of actor/training 1.norm param [0, 8) differ: devices 0 and 3" in str(outcome.error)
    assert outcome.units == dag.start
    assert outcome.received_bytes == {}
    emptied(crew, dag.start)


def test_a_tensor_changed_on_the_way_has_another_hash() -> None:
    dag, primitive = transition("Merge")
    fault = Fault(1, "transition.apply", primitive, after=True, spoils=("0.o", Kind.PARAM))
    with Crew({d: DeviceSettings() for d in range(4)}, PROGRAM, {"fault": fault}, timeout_s=20) as crew:
        started(crew, range(4))
        fill(crew, dag.start)
        outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=20, verify=True).execute(dag)
        assert "actor/training: another hash after the transition: 0.o param (1 in all)" in str(outcome.error)


@pytest.mark.parametrize("kind", ENDS)
def test_with_verify_a_sound_transition_completes(crew: Crew, kind: str) -> None:
    dag, _ = transition(kind)
    fill(crew, dag.start)
    outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=20, verify=True).execute(dag)
    assert outcome.completed, outcome.error
    check_state(crew, dag.goal)
    emptied(crew, dag.goal)


def test_new_replicas_forward_what_they_got(crew: Crew) -> None:
    start = EMUSet(tuple(units(TRAINING, Layout(1), (0,))))
    goal = EMUSet(tuple(units(TRAINING, Layout(1), (0,), (1,), (2,), (3,))))
    dag = connect(start, goal, SCHEMAS)
    assert any(unit not in start for primitive in dag.primitives for unit in primitive.sources)
    fill(crew, start)
    outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=20).execute(dag)
    assert outcome.completed, outcome.error
    check_state(crew, goal)
    whole_bytes = outcome.received_bytes[1]
    assert [outcome.received_bytes[device] for device in (1, 2, 3)] == [whole_bytes] * 3
    assert max(outcome.sent_bytes.values()) <= 2 * whole_bytes, "log2 of four units"
    emptied(crew, goal)


def test_transitions_that_overlap_on_two_devices_always_finish(crew: Crew) -> None:
    """Communicators over the same devices, members late by random times: one order for all, ten of ten."""

    def there(model_stage: ModelStage, first: int) -> list[EMU]:
        return units(model_stage, Layout(2), (first, first + 1))

    ends = [EMUSet((*there(TRAINING, 0), *there(INFERENCE, 2))), EMUSet((*there(TRAINING, 1), *there(INFERENCE, 1)))]
    fill(crew, ends[0])
    executor = TransitionExecutor(crew, SCHEMAS, timeout_s=20)
    for turn in range(10):
        outcome = executor.execute(connect(ends[turn % 2], ends[1 - turn % 2], SCHEMAS))
        assert outcome.completed, outcome.error
    check_state(crew, ends[0])
    emptied(crew, ends[0])


def test_units_that_swap_full_devices_go_through_host_memory() -> None:
    """Two model-stages whose only copies change places, neither device with room for both."""
    weight = TensorSpec("w", (256, 64), Where.LAYER, 0, Cut(0, 4))
    kinds = dict.fromkeys((Kind.PARAM, Kind.EXP_AVG, Kind.EXP_AVG_SQ), "fp32")
    schemas = dict.fromkeys((TRAINING, INFERENCE), StateSchema(1, (weight,), kinds))
    start = EMUSet((*units(TRAINING, Layout(1), (0,)), *units(INFERENCE, Layout(1), (1,))))
    goal = EMUSet((*units(TRAINING, Layout(1), (1,)), *units(INFERENCE, Layout(1), (0,))))
    stored = stored_bytes(start, schemas)
    buffers = 2 * bucket_bytes((weight,), kinds)
    capacity = {device: stored[device] + buffers for device in range(2)}
    assert buffers < stored[0] // 4, "no room for a second position"
    dag = connect(
        start, goal, schemas, Budget(capacity, host_bytes={0: 1 << 30}, buffer_bytes=buffers), Site({0: 0, 1: 0})
    )
    assert dag.offloaded
    limits = {device: DeviceSettings(capacity_bytes=room) for device, room in capacity.items()}
    with Crew(limits, PROGRAM, timeout_s=20) as crew:
        started(crew, range(2))
        fill(crew, start, schemas)
        outcome = TransitionExecutor(crew, schemas, timeout_s=20, verify=True).execute(dag)
        assert outcome.completed, outcome.error
        check_state(crew, goal, schemas)
        for device, reply in crew.call(range(2), Message("memory"), WAIT_S).items():
            assert reply.fields["host_bytes"] == 0, "nothing stays in host memory"
            assert reply.fields["peak_bytes"] <= capacity[device]


def test_what_lies_in_host_memory_comes_back_when_the_transition_stops() -> None:
    start = EMUSet(tuple(units(TRAINING, Layout(1), (0,))))
    goal = EMUSet(tuple(units(TRAINING, Layout(1), (1,))))
    (unit,) = start
    size = stored_bytes(start, SCHEMAS)[0]
    dag = connect(start, goal, SCHEMAS)
    staged = TransitionDAG(
        start,
        goal,
        (Offload("offload", (unit,), (), "offload", releases={0: size}, hosts={0: size}), *dag.primitives),
        (Edge("offload", dag.primitives[0].id, EdgeKind.RESOURCE), *dag.edges),
    )
    fault = Fault(1, "transition.apply", dag.primitives[0].id)
    with Crew({d: DeviceSettings() for d in range(2)}, PROGRAM, {"fault": fault}, timeout_s=20) as crew:
        started(crew, range(2))
        fill(crew, start)
        outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=20).execute(staged)
        assert "device 1 is lost" in str(outcome.error)
        assert outcome.units == start
        check_state(crew, start)
        (reply,) = crew.call([0], Message("memory"), WAIT_S).values()
        assert reply.fields["host_bytes"] == 0
