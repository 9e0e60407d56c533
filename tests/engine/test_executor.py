"""Transitions of live state on real processes, bit for bit against an oracle; failures leave whole units."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest

from nereus.core import (
    EMU,
    Cut,
    Destroy,
    Edge,
    EdgeKind,
    EMUSet,
    Extend,
    Kind,
    Layout,
    LogicalState,
    ModelStage,
    StateSchema,
    TensorSpec,
    TransitionDAG,
    Where,
)
from nereus.engine.connection import Message
from nereus.engine.crew import Crew, Reply
from nereus.engine.executor import TransitionExecutor
from nereus.engine.progress import Progress, one_layout
from nereus.engine.transports.attach import CARD_BYTES
from nereus.engine.worker import DeviceSettings
from nereus.transition.compile import connect
from nereus.transition.fit import fit, stored_bytes
from nereus.transition.routes import pair_bytes
from tests.engine.crews import (
    COUNTERS,
    INFERENCE,
    PROGRAM,
    SCHEMAS,
    TRAINING,
    WAIT_S,
    check_state,
    fill,
    read,
    started,
    units,
)
from tests.oracles.cut import lacks_bytes


@pytest.fixture(scope="module")
def shared() -> Iterator[Crew]:
    with Crew({device: DeviceSettings() for device in range(4)}, PROGRAM, timeout_s=20) as crew:
        yield started(crew, range(4))


@pytest.fixture
def crew(shared: Crew) -> Iterator[Crew]:
    """The shared crew, empty again afterwards."""
    yield shared
    held = [unit for unit, _ in read(shared).values()]
    shared.call(range(4), Message("transition.abort"), WAIT_S)
    shared.call(range(4), Message("transition.destroy", {"units": held}), WAIT_S)


def random_units(source: random.Random, model_stage: ModelStage, devices: list[int]) -> list[EMU]:
    layouts = [
        Layout(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 3) if tp * pp <= len(devices) and pp <= 3 and tp * pp <= 4
    ]
    layout = source.choice(layouts)
    count = source.randint(1, len(devices) // layout.size)
    order = source.sample(devices, count * layout.size)
    parts = [tuple(order[i * layout.size : (i + 1) * layout.size]) for i in range(count)]
    return units(model_stage, layout, *parts)


def random_walk(seed: int, steps: int) -> list[EMUSet]:
    source = random.Random(seed)
    walk: list[EMUSet] = []
    while len(walk) < steps:
        pool = source.sample(range(4), source.choice((2, 3, 4, 4)))
        found = EMUSet(tuple(random_units(source, TRAINING, pool) + random_units(source, INFERENCE, pool)))
        before = walk[-1].of(TRAINING)[0].layout if walk else None
        if found.of(TRAINING)[0].layout != before:
            walk.append(found)
    return walk


@pytest.mark.processes
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_state_is_exact_after_each_of_many_transitions(crew: Crew, seed: int) -> None:
    walk = random_walk(seed, 11)
    fill(crew, walk[0])
    check_state(crew, walk[0])
    executor = TransitionExecutor(crew, SCHEMAS, timeout_s=20)
    seen = set()
    for start, goal in pairwise(walk):
        dag = connect(start, goal, SCHEMAS)
        crew.call(range(4), Message("reset_peak"), WAIT_S)
        outcome = executor.execute(dag)
        assert outcome.completed, outcome.error
        assert outcome.units == goal
        check_state(crew, goal)
        kept = set(start) & set(goal)
        for device in range(4):
            lacking = sum(
                lacks_bytes(SCHEMAS[unit.model_stage], start.of(unit.model_stage), unit, device)
                for unit in goal.on(device)
                if unit not in kept
            )
            assert outcome.received_bytes.get(device, 0) == lacking
        assert sum(outcome.sent_bytes.values()) == sum(outcome.received_bytes.values())
        assert outcome.primitive_s.keys() == {primitive.id for primitive in dag.primitives}
        check_peaks(crew, dag)
        seen |= {primitive.name for primitive in dag.primitives}
    assert {"Extend", "Merge", "Destroy"} <= seen
    for reply in crew.call(range(4), Message("groups.names"), WAIT_S).values():
        assert reply.fields["names"] == (), "the transition's group is gone"


@pytest.mark.processes
def test_state_is_exact_where_some_pairs_read_and_others_send() -> None:
    """Device 2 neither reads nor shows its memory."""
    walk = random_walk(3, 8)
    limits = {device: DeviceSettings(read_memory=device != 2) for device in range(4)}
    with Crew(limits, PROGRAM, timeout_s=20) as crew:
        fill(started(crew, range(4)), walk[0])
        for start, goal in pairwise(walk):
            outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=20).execute(connect(start, goal, SCHEMAS))
            assert outcome.completed, outcome.error
            check_state(crew, goal)


@pytest.mark.processes
def test_columns_in_very_many_pieces_are_packed_and_sent() -> None:
    """Half of 3,000 rows in pieces of 8 bytes, of two kinds: more than are worth reading one by one."""
    wide = TensorSpec("w", (3000, 4), Where.LAYER, 0, Cut(1, 4))
    schemas = {TRAINING: StateSchema(1, (wide,), {Kind.PARAM: "fp32", Kind.EXP_AVG: "fp32"})}
    start, goal = (EMUSet(tuple(units(TRAINING, layout, devices))) for layout, devices in ENDS)
    with Crew({device: DeviceSettings() for device in range(3)}, PROGRAM, timeout_s=20) as crew:
        fill(started(crew, range(3)), start, schemas)
        executor = TransitionExecutor(crew, schemas, timeout_s=20)
        asked: list[str] = []
        call = crew.call

        def noted(devices: Iterable[int], message: Message, timeout_s: float) -> dict[int, Message]:
            asked.append(message.name)
            return call(devices, message, timeout_s)

        crew.call = noted  # type: ignore[method-assign]
        for ends, sends in (((start, goal), True), ((goal, start), False)):
            asked.clear()
            outcome = executor.execute(connect(*ends, schemas))
            assert outcome.completed, outcome.error
            assert ("transition.connect" in asked) == sends
            check_state(crew, ends[1], schemas)


ENDS = ((Layout(1), (0,)), (Layout(2), (1, 2)))


def check_peaks(crew: Crew, dag: TransitionDAG) -> None:
    """What the workers allocate is what the plan says: state alone, staging buffers apart."""
    predicted = fit(dag, SCHEMAS, {})
    for device, reply in crew.call(sorted(dag.devices), Message("memory"), WAIT_S).items():
        measured = reply.fields["by_category"]
        assert measured["state"] <= predicted[device]
        assert reply.fields["peak_bytes"] >= predicted[device] or not any(
            device in primitive.acquires for primitive in dag.primitives
        )


@pytest.mark.processes
def test_an_infeasible_goal_leaves_everything_as_it_was() -> None:
    start = EMUSet(tuple(units(TRAINING, Layout(2), (0, 1))))
    goal = EMUSet(tuple(units(TRAINING, Layout(1), (0,), (1,))))
    room = int(1.5 * stored_bytes(start, SCHEMAS)[0])
    with Crew({d: DeviceSettings(capacity_bytes=room) for d in range(2)}, PROGRAM, timeout_s=20) as crew:
        started(crew, range(2))
        fill(crew, start)
        crew.call([0, 1], Message("groups.make", {"groups": [("tp#1", (0, 1))]}), WAIT_S)
        outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=20).execute(connect(start, goal, SCHEMAS))
        assert not outcome.completed
        assert "more than its capacity" in str(outcome.error)
        assert outcome.units == start
        check_state(crew, start)
        names = [r.fields["names"] for r in crew.call([0, 1], Message("groups.names"), WAIT_S).values()]
        assert names == [("tp#1",), ("tp#1",)]


@pytest.mark.processes
def test_the_last_copy_is_never_destroyed(crew: Crew) -> None:
    start = EMUSet(tuple(units(TRAINING, Layout(2), (0, 1))))
    fill(crew, start)
    dag = TransitionDAG(start, EMUSet(()), (Destroy("gone", tuple(start), (), "gone"),))
    outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=20).execute(dag)
    assert "last copy" in str(outcome.error)
    assert outcome.units == start
    check_state(crew, start)


@pytest.mark.processes
def test_units_at_different_updates_are_refused(crew: Crew) -> None:
    start = EMUSet(tuple(units(TRAINING, Layout(1), (0,), (1,))))
    fill(crew, EMUSet(start.units[:1]))
    late = {"unit": start.units[1], "schema": SCHEMAS[TRAINING], "logical": LogicalState(update_count=6)}
    crew.call([1], Message("load", late), WAIT_S)
    dag = connect(start, EMUSet(tuple(units(TRAINING, Layout(2), (0, 1)))), SCHEMAS)
    outcome = TransitionExecutor(crew, SCHEMAS, timeout_s=20).execute(dag)
    assert "finish the update on every unit first" in str(outcome.error)
    assert outcome.units == start


def primitives(*names: str, devices: Mapping[str, tuple[int, int]]) -> tuple[Extend, ...]:
    return tuple(
        Extend(name, (EMU(TRAINING, Layout(), devices[name][:1]),), (EMU(TRAINING, Layout(), devices[name][1:]),), name)
        for name in names
    )


def test_disjoint_devices_run_together_and_overlapping_ones_in_listed_order() -> None:
    steps = primitives("a", "b", "c", "d", devices={"a": (0, 1), "b": (2, 3), "c": (1, 4), "d": (4, 5)})
    dag = TransitionDAG(EMUSet(()), EMUSet(()), steps)
    progress = Progress(dag, [], {})
    assert [p.id for p in progress.startable()] == ["a", "b"], "d must not overtake c, which waits for a"
    progress.done |= {"a"}
    assert [p.id for p in progress.startable()] == ["b", "c"]


def test_primitives_of_one_commit_group_are_told_ahead_and_no_others() -> None:
    """b and c belong together and share device 1; d, of another group, waits for both on device 1."""
    devices = {"a": (0, 1), "b": (1, 2), "c": (1, 3), "d": (1, 4)}
    a, b, c, d = primitives(*"abcd", devices=devices)
    b, c = replace(b, group="g"), replace(c, group="g")
    edges = (Edge("b", "c", EdgeKind.RESOURCE), Edge("c", "d", EdgeKind.RESOURCE))
    progress = Progress(TransitionDAG(EMUSet(()), EMUSet(()), (a, b, c, d), edges), [], {})
    assert [p.id for p in progress.startable()] == ["a"], "b waits for a, and c for b"
    progress.done |= {"a"}
    assert [p.id for p in progress.startable()] == ["b", "c"]
    progress.waiting = {1: ("b", 1), 2: ("c", 1)}
    assert progress.startable() == []
    progress.waiting = {2: ("c", 1)}
    progress.done |= {"b"}
    assert progress.startable() == []
    progress.waiting = {}
    progress.done |= {"c"}
    assert [p.id for p in progress.startable()] == ["d"]


def test_a_destroy_waits_for_the_commit_of_what_reads_its_unit() -> None:
    (extend,) = primitives("a", devices={"a": (0, 1)})
    destroy = Destroy("z", extend.sources, (), "z")
    dag = TransitionDAG(EMUSet(()), EMUSet(()), (extend, destroy), (Edge("a", "z", EdgeKind.STATE),))
    progress = Progress(dag, [], {}, done={"a"})
    assert progress.startable() == []
    assert progress.committable() == ["a"]
    progress.committed.add("a")
    assert [p.id for p in progress.startable()] == ["z"]


def test_a_destroy_waits_until_all_have_said_that_they_committed() -> None:
    (extend,) = primitives("a", devices={"a": (0, 1)})
    destroy = Destroy("z", extend.sources, (), "z")
    dag = TransitionDAG(EMUSet(()), EMUSet(()), (extend, destroy), (Edge("a", "z", EdgeKind.STATE),))
    progress = Progress(dag, [], {}, done={"a"}, committed={"a"}, telling={5: ("commit of a", 1)})
    assert progress.moved
    assert progress.startable() == []
    assert progress.take(5, Message("transition.commit")) is None
    assert [p.id for p in progress.startable()] == ["z"]
    assert not progress.complete


class Diary(Crew):
    """Devices that answer in order; notes what they are told and when the coordinator waits."""

    def __init__(self, dag: TransitionDAG, reads: bool = False) -> None:
        super().__init__({}, "none")
        self.told: list[str] = []
        self.asked: list[tuple[str, int, tuple[str, ...]]] = []
        self.traffic = pair_bytes(dag, SCHEMAS)
        self.reads = frozenset(dag.devices) if reads else frozenset[int]()

    def submit(self, device: int, message: Message) -> int:
        self._tickets += 1
        self.told.append(message.name.removeprefix("transition."))
        pairs = self.traffic.get(message.fields.get("primitive", ""), {})
        received = sum(size for (_, target), size in pairs.items() if target == device)
        fields = {"received_bytes": received, "shown": True, "used_bytes": 0, "capacity_bytes": None}
        known = {"logical": {TRAINING: COUNTERS}, "environment": "", "card": bytes(CARD_BYTES), "reads": self.reads}
        places = {"transition.begin": {str(TRAINING): ONE}, "transition.apply": {"places": ONE}}
        self._replies[self._tickets] = Message(message.name, fields | known, places.get(message.name, {}))
        self.asked.append((self.told[-1], device, tuple(message.arrays)))
        return self._tickets

    def poll(self, timeout_s: float) -> list[tuple[int, Reply]]:
        self.told.append("wait")
        return super().poll(timeout_s)


def test_commit_and_end_are_told_in_one_flight_and_a_destroy_after_their_answers() -> None:
    start, goal = (EMUSet(tuple(units(TRAINING, layout, (0, 1)))) for layout in (Layout(1, 2), Layout(2)))
    dag = connect(start, goal, SCHEMAS)
    assert [p.name for p in dag.primitives][-1] == "Destroy"
    crew = Diary(dag)
    outcome = TransitionExecutor(crew, SCHEMAS).execute(dag)
    assert outcome.completed, outcome.error
    each = [name for name, _ in groupby(crew.told)]
    assert each == ["look", "begin", "connect", "apply", "wait", "commit", "end", "wait", "destroy", "wait"]


def test_a_source_that_is_read_is_asked_for_nothing_and_nobody_connects() -> None:
    """A chain: 1 reads from 0, then 2 from 1, whose place is known once it has one, or from 0."""
    start, goal = (EMUSet(tuple(units(TRAINING, Layout(1), *each))) for each in (((0,),), ((0,), (1,), (2,), (3,))))
    dag = connect(start, goal, SCHEMAS)
    crew = Diary(dag, reads=True)
    outcome = TransitionExecutor(crew, SCHEMAS).execute(dag)
    assert outcome.completed, outcome.error
    applied = {device: sources for name, device, sources in crew.asked if name == "apply"}
    assert applied.keys() == {1, 2, 3}
    assert all(len(sources) == 1 for sources in applied.values())
    assert set().union(*applied.values()) == {"0", "1"}, "a new replica forwards"
    assert "connect" not in crew.told
    whole_bytes = outcome.received_bytes[1]
    assert outcome.sent_bytes == {0: 2 * whole_bytes, 1: whole_bytes}


ONE = np.zeros(1, np.int64)


def test_units_that_are_left_have_one_layout_for_each_model_stage() -> None:
    wide, narrow = units(TRAINING, Layout(2), (0, 1)), units(TRAINING, Layout(1), (2,), (3,), (4,))
    scored = units(INFERENCE, Layout(1), (0,))
    assert one_layout((*wide, *scored, *narrow)) == (*scored, *narrow), "three devices do more than two"
    assert one_layout((*wide, *narrow[:2])) == tuple(wide), "the first of equals"
