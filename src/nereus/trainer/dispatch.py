"""Runs the calls of a step at the same time where their devices are disjoint, in turns where they are not (D5.2).

A *routine* is a generator: it yields the tickets it waits for and is sent their replies. It never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field

from nereus.core import NereusError, TransportError
from nereus.engine.connection import Message
from nereus.engine.crew import LEAST_GRACE_S, Crew, Reply, explain, grace_s

Replies = Mapping[int, Message]
Routine = Generator[Collection[int], Replies, None]


@dataclass(frozen=True, slots=True)
class Task:
    """A routine that may start once the tasks `after` are done and nothing else runs on its devices."""

    name: str
    devices: frozenset[int]
    after: frozenset[str]
    start: Callable[[], Routine]
    more_s: float = 0.0
    """How much longer than other tasks' its commands may take."""


@dataclass(slots=True)
class _Running:
    task: Task
    routine: Routine
    waiting: set[int] = field(default_factory=set)
    replies: dict[int, Message] | None = None
    """What has come of what it waits for; None before it has begun."""
    began_s: float = field(default_factory=time.perf_counter)


def run(crew: Crew, tasks: Iterable[Task], timeout_s: float, poll_s: float = 0.05) -> dict[str, float]:
    """Run every task; returns the wall seconds of each.

    Raises the error that explains the others when workers fail: a lost worker, then out of memory, then anything that
    is not the broken connection which these cause in their peers. By then no reply is outstanding and no worker has a
    group left (D5.5): one that has not answered by the deadline that its peers had too is ended.
    """
    pending = list(tasks)
    done = dict.fromkeys(frozenset[str]().union(*(task.after for task in pending)) - {t.name for t in pending}, 0.0)
    running: list[_Running] = []
    heard_s = time.monotonic()
    try:
        while pending or running:
            _start_ready(pending, running, done)
            if _advance(running, done):
                continue
            arrived = crew.poll(poll_s)
            if not arrived:
                _check_silence(running, timeout_s, heard_s)
                continue
            errors = _enter(running, arrived)
            if errors:
                raise explain(errors)
            heard_s = time.monotonic()
    except NereusError as error:
        raise explain([error, *_drain(crew, running, timeout_s, heard_s)]) from None
    return {task: seconds for task, seconds in done.items() if seconds}


def _allowed_s(running: Collection[_Running], timeout_s: float) -> float:
    return timeout_s + max((entry.task.more_s for entry in running), default=0.0)


def _check_silence(running: Collection[_Running], timeout_s: float, heard_s: float) -> None:
    """Raises TransportError once workers that wait for their peers would have given up."""
    allowed_s = _allowed_s(running, timeout_s)
    if time.monotonic() - heard_s > allowed_s + grace_s(allowed_s):
        names = ", ".join(entry.task.name for entry in running)
        raise TransportError(f"no worker answered within {allowed_s:.3g} s while running {names}; see run.timeout_s")


def _start_ready(pending: list[Task], running: list[_Running], done: Mapping[str, float]) -> None:
    """Start tasks in order; one that waits for its devices alone keeps them from later ones, so that none starves."""
    taken = {device for entry in running for device in entry.task.devices}
    for task in tuple(pending):
        if not task.after <= set(done):
            continue
        if not task.devices & taken:
            running.append(_Running(task, task.start()))
            pending.remove(task)
        taken |= task.devices


def _enter(running: Collection[_Running], arrived: Collection[tuple[int, Reply]]) -> list[NereusError]:
    """Hand replies to the routines that wait for them; the errors among them."""
    for ticket, reply in arrived:
        for entry in running:
            if ticket in entry.waiting:
                entry.waiting.discard(ticket)
                if isinstance(reply, Message) and entry.replies is not None:
                    entry.replies[ticket] = reply
    return [reply for _, reply in arrived if isinstance(reply, NereusError)]


def _advance(running: list[_Running], done: dict[str, float]) -> bool:
    """Send every routine that waits for nothing on its way; whether one came to its end."""
    ended = False
    for entry in tuple(running):
        if entry.waiting:
            continue
        replies, entry.replies = entry.replies, {}
        try:
            entry.waiting = set(next(entry.routine) if replies is None else entry.routine.send(replies))
        except StopIteration:
            running.remove(entry)
            done[entry.task.name] = time.perf_counter() - entry.began_s
            ended = True
    return ended


def _drain(crew: Crew, running: Collection[_Running], timeout_s: float, heard_s: float) -> list[NereusError]:
    """Wait until every outstanding reply has come; their errors. `heard_s` is when the last came that was none.

    Idle workers drop their groups first: somebody may wait for one whose own command was never sent. What runs has its
    own deadline and no second one; whoever has still not answered is ended, as its work could wake up in other work.
    """
    allowed_s = _allowed_s(running, timeout_s)
    deadline_s = max(heard_s + allowed_s + grace_s(allowed_s), time.monotonic() + LEAST_GRACE_S)
    devices = crew.ready()
    outstanding = {ticket for entry in running for ticket in entry.waiting}
    outstanding |= {crew.submit(device, Message("groups.reset")) for device in sorted(devices)}
    errors: list[NereusError] = []
    while outstanding and time.monotonic() < deadline_s:
        for ticket, reply in crew.poll(0.05):
            outstanding.discard(ticket)
            if isinstance(reply, NereusError):
                errors.append(reply)
    if outstanding:
        crew.settle(devices, allowed_s, allowed_s + grace_s(allowed_s))
        try:
            crew.raise_lost()
        except NereusError as error:
            errors.append(error)
    return errors
