"""Runs the calls of a step at the same time where their devices are disjoint, in turns where they are not (D5.2).

A *routine* is a generator: it yields the tickets it waits for and is sent their replies. It never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass

from nereus.core import NereusError, TransportError
from nereus.engine.connection import Message
from nereus.engine.crew import Crew, explain

Replies = Mapping[int, Message]
Routine = Generator[Collection[int], Replies, None]


@dataclass(frozen=True, slots=True)
class Task:
    """A routine that may start once the tasks `after` are done and nothing else runs on its devices."""

    name: str
    devices: frozenset[int]
    after: frozenset[str]
    start: Callable[[], Routine]


@dataclass(slots=True)
class _Running:
    task: Task
    routine: Routine
    waiting: set[int]
    replies: dict[int, Message]
    began_s: float


def run(crew: Crew, tasks: Iterable[Task], timeout_s: float, poll_s: float = 0.05) -> dict[str, float]:
    """Run every task; returns the wall seconds of each.

    Raises the error that explains the others when workers fail: a lost worker, then out of memory, then anything that
    is not the broken connection which these cause in their peers. By then no reply is outstanding.
    """
    pending = list(tasks)
    done = dict.fromkeys(frozenset[str]().union(*(task.after for task in pending)) - {t.name for t in pending}, 0.0)
    running: list[_Running] = []
    heard_s = time.monotonic()
    while pending or running:
        _start_ready(pending, running, done)
        arrived = crew.poll(poll_s)
        if arrived:
            heard_s = time.monotonic()
        elif time.monotonic() - heard_s > timeout_s:
            names = ", ".join(entry.task.name for entry in running)
            raise TransportError(f"no worker answered for {timeout_s:.0f} s while running {names}; see run.timeout_s")
        errors = [reply for _, reply in arrived if isinstance(reply, NereusError)]
        if errors:
            raise explain(errors + _drain(crew, running, arrived, timeout_s))
        for ticket, reply in arrived:
            if isinstance(reply, Message):
                _deliver(running, done, ticket, reply)
    return {task: seconds for task, seconds in done.items() if seconds}


def _start_ready(pending: list[Task], running: list[_Running], done: Mapping[str, float]) -> None:
    """Start tasks in order; one that waits for its devices alone keeps them from later ones, so that none starves."""
    taken = {device for entry in running for device in entry.task.devices}
    for task in tuple(pending):
        if not task.after <= set(done):
            continue
        if not task.devices & taken:
            routine = task.start()
            running.append(_Running(task, routine, set(next(routine)), {}, time.perf_counter()))
            pending.remove(task)
        taken |= task.devices


def _deliver(running: list[_Running], done: dict[str, float], ticket: int, reply: Message) -> None:
    for entry in tuple(running):
        if ticket not in entry.waiting:
            continue
        entry.replies[ticket] = reply
        entry.waiting.discard(ticket)
        if entry.waiting:
            return
        replies, entry.replies = entry.replies, {}
        try:
            entry.waiting = set(entry.routine.send(replies))
        except StopIteration:
            running.remove(entry)
            done[entry.task.name] = time.perf_counter() - entry.began_s
        return


def _drain(
    crew: Crew, running: Collection[_Running], arrived: Collection[tuple[int, object]], timeout_s: float
) -> list[NereusError]:
    """Wait until every outstanding reply has come; their errors."""
    outstanding = {ticket for entry in running for ticket in entry.waiting} - {ticket for ticket, _ in arrived}
    errors: list[NereusError] = []
    deadline_s = time.monotonic() + timeout_s
    while outstanding and time.monotonic() < deadline_s:
        for ticket, reply in crew.poll(0.05):
            outstanding.discard(ticket)
            if isinstance(reply, NereusError):
                errors.append(reply)
    return errors
