"""How long a transition waits in all, on a clock that only waiting moves; deadlines grow with what moves."""

# ruff: noqa: ARG002
from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nereus.core import EMUSet, Layout, Offload, StateSchema, TransitionDAG, WorkerLostError
from nereus.engine import executor, progress
from nereus.engine.apply import environment
from nereus.engine.connection import Message
from nereus.engine.crew import Crew, Reply, grace_s
from nereus.engine.executor import TransitionExecutor
from nereus.engine.transports.attach import CARD_BYTES
from nereus.trainer.weights import moving_s
from nereus.transition.compile import connect
from nereus.transition.routes import fingerprint
from tests.engine.crews import COUNTERS, INFERENCE, SCHEMAS, TRAINING, units

STOPPED = 3
TIMEOUT_S = 60.0


class StoppedPeer(Crew):
    """Devices answer at once, but for one that never answers from a command on; `now_s` is what waiting adds up to."""

    def __init__(self, dag: TransitionDAG, command: str) -> None:
        super().__init__({}, "none")
        self.dag, self.command = dag, command
        self.now_s = 1000.0
        self.alive = set(dag.devices)
        self.silent = False
        self.asked: list[tuple[str, float]] = []

    def monotonic(self) -> float:
        return self.now_s

    def started(self) -> frozenset[int]:
        return frozenset(self.alive)

    def submit(self, device: int, message: Message) -> int:
        self._tickets += 1
        self.silent |= device == STOPPED and message.name == self.command
        if device == STOPPED and self.silent:
            self._abandoned.add(self._tickets)
        elif message.name != "transition.apply":  # its peers wait for it
            self._replies[self._tickets] = self.answer(message)
        return self._tickets

    def answer(self, message: Message) -> Reply:
        sizes = {"used_bytes": 0, "capacity_bytes": None, "received_bytes": 0, "sent_bytes": 0, "staged": ()}
        routes = fingerprint(self.dag, {ms: SCHEMAS[ms] for ms in (TRAINING,)})
        told = {"logical": {TRAINING: COUNTERS}, "environment": environment(), "card": bytes(CARD_BYTES), "reads": ()}
        return Message(message.name, {**sizes, **told, "shown": True, "routes": routes})

    def gather(self, tickets: Collection[int], timeout_s: float) -> dict[int, Reply]:
        late = WorkerLostError(STOPPED, f"no answer within {timeout_s:.3g} s")
        found = {ticket: self._replies.pop(ticket, late) for ticket in tickets}
        if late in found.values():
            self.now_s += timeout_s + grace_s(timeout_s)
        return found

    def poll(self, timeout_s: float) -> list[tuple[int, Reply]]:
        self.now_s += timeout_s
        found = list(self._replies.items())
        self._replies.clear()
        return found

    def settle(self, devices: Collection[int], timeout_s: float, passed_s: float = 0.0) -> None:
        if self.silent and STOPPED in self.alive:
            self.now_s += max(0.0, timeout_s + grace_s(timeout_s) - passed_s)
            self.alive.discard(STOPPED)


@pytest.mark.parametrize("command", ["look", "begin", "connect", "apply", "hash"])
def test_a_stopped_peer_costs_one_deadline_and_the_time_to_say_so(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = units(TRAINING, Layout(1), (0,), (3,)) if command == "hash" else units(TRAINING, Layout(2), (0, 3))
    start = EMUSet(tuple(replicas))
    dag = connect(start, EMUSet(tuple(units(TRAINING, Layout(4), (0, 1, 2, 3)))), SCHEMAS)
    crew = StoppedPeer(dag, f"transition.{command}")
    began_s = crew.now_s
    clock = SimpleNamespace(monotonic=crew.monotonic, perf_counter=crew.monotonic)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(executor, "time", clock)
    outcome = TransitionExecutor(crew, SCHEMAS, TIMEOUT_S).execute(dag)
    assert not outcome.completed
    assert "device 3" in str(outcome.error)
    assert "within 60 s" in str(outcome.error)
    assert crew.now_s - began_s <= TIMEOUT_S + grace_s(TIMEOUT_S) + 1, "it was waited for again"


def grown(schema: StateSchema, factor: int) -> StateSchema:
    """The same tensors, `factor` times as wide where they are not cut."""
    tensors = [
        replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] * factor)) if tensor.cut.dim == 0 else tensor
        for tensor in schema.tensors
    ]
    return replace(schema, tensors=tuple(tensors))


def test_a_synchronisation_may_take_longer_for_more_bytes() -> None:
    sources, targets = (tuple(units(ms, Layout(2), each)) for ms, each in ((TRAINING, (0, 1)), (INFERENCE, (2, 3))))
    small, large = (moving_s(grown(SCHEMAS[TRAINING], factor), sources, targets) for factor in (1, 1000))
    assert 0 < small < 1
    assert large > 500 * small


def test_a_unit_in_host_memory_may_take_longer_for_more_bytes() -> None:
    start = EMUSet(tuple(units(TRAINING, Layout(1), (0,))))
    dag = connect(start, EMUSet(tuple(units(TRAINING, Layout(1), (1,)))), SCHEMAS)
    staged = Offload("offload", tuple(start), (), "offload", releases={0: 10**10}, hosts={0: 10**10})
    assert executor.staged_bytes(dag) == 0
    assert executor.staged_bytes(replace_primitives(dag, staged)) == 10**10


def replace_primitives(dag: TransitionDAG, first: Offload) -> TransitionDAG:
    return TransitionDAG(dag.start, dag.goal, (first, *dag.primitives), dag.edges)
