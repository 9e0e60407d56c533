"""The coordinator's side of the workers: starts and ends them, sends commands, matches replies, notices deaths.

A worker answers its commands in order, so a reply belongs to the oldest unanswered ticket of that worker. Replies that
nobody waits for any more are thrown away when they come.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from torch import distributed

from nereus.core import NereusError, OutOfMemoryError, SettingsError, TransportError, WorkerLostError
from nereus.engine.connection import Message, receive, send
from nereus.engine.groups import lost_key, tell_lost
from nereus.engine.launch import Launched, launch, signals_wait
from nereus.engine.worker import DeviceSettings, WorkerSettings

log = logging.getLogger(__name__)

STOP_S = 5.0
"""How long a worker may take to end politely."""
LEAST_GRACE_S = 2.0

Reply = Message | NereusError


@dataclass(slots=True)
class _Member:
    launched: Launched
    ready: bool = False
    unanswered: deque[int] = field(default_factory=deque)


class Crew:
    """One worker process per started device. Use as a context manager, or call `close`."""

    def __init__(
        self,
        devices: Mapping[int, DeviceSettings],
        program: str,
        options: Any = None,
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
    ) -> None:
        self._devices = dict(devices)
        self._program = program
        self._options = options
        self._timeout_s = timeout_s
        self._host = host
        self._store: distributed.TCPStore | None = None
        self._port = 0
        self._members: dict[int, _Member] = {}
        self._lost: dict[int, WorkerLostError] = {}
        self._failed: dict[int, WorkerLostError] = {}
        self._replies: dict[int, Reply] = {}
        self._abandoned: set[int] = set()
        self._tickets = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, ids: Iterable[int]) -> None:
        """Start the workers of devices; returns before they are ready. Those that run already are left alone."""
        for device in sorted(set(ids)):
            if device in self._members:
                continue
            if device not in self._devices:
                raise SettingsError(f"device {device} is unknown, valid: {sorted(self._devices)}")
            self._listen()
            if self._lost.pop(device, None) is not None and self._store is not None:
                self._store.delete_key(lost_key(device))
            settings = WorkerSettings(
                device=device,
                limits=self._devices[device],
                timeout_s=self._timeout_s,
                program=self._program,
                options=self._options,
                store_host=self._host,
                store_port=self._port,
            )
            with signals_wait():
                self._members[device] = _Member(launch(settings))

    def started(self) -> frozenset[int]:
        """Devices whose workers run, ready or not."""
        self._pump(0)
        return frozenset(self._members)

    def ready(self) -> frozenset[int]:
        """Devices whose workers have warmed up. Raises what kept a worker from starting."""
        self._pump(0)
        if self._failed:
            raise self._failed.pop(min(self._failed))
        return frozenset(device for device, member in self._members.items() if member.ready)

    def wait_ready(self, ids: Collection[int], timeout_s: float) -> None:
        """Block until the workers of `ids` are ready. Raises WorkerLostError for one that is not in time."""
        deadline_s = time.monotonic() + timeout_s
        while missing := set(ids) - self.ready():
            device = min(missing)
            if device not in self._members:
                raise self._lost.get(device) or WorkerLostError(device, "it was never started")
            if time.monotonic() > deadline_s:
                raise WorkerLostError(device, f"not ready within {timeout_s:g} s")
            self._pump(max(0.0, deadline_s - time.monotonic()))

    def raise_lost(self) -> None:
        """Raise the WorkerLostError of a worker that has died and has not been started again, if there is one."""
        self._pump(0)
        if self._lost:
            raise self._lost[min(self._lost)]

    def pids(self) -> dict[int, int]:
        """Device → process id."""
        return {device: member.launched.process.pid or 0 for device, member in self._members.items()}

    def submit(self, device: int, message: Message) -> int:
        """Send a command; the ticket stands for its reply. Raises WorkerLostError when there is no such worker."""
        member = self._members.get(device)
        if member is None:
            raise self._lost.get(device) or WorkerLostError(device, "it was never started")
        self._tickets += 1
        member.unanswered.append(self._tickets)
        try:
            send(member.launched.connection, message)
        except OSError:
            self._lose(device)
        return self._tickets

    def poll(self, timeout_s: float) -> list[tuple[int, Reply]]:
        """Every reply or error that has come, as soon as there is one; empty after `timeout_s`."""
        if not self._replies:
            self._pump(timeout_s)
        arrived = sorted(self._replies.items())
        self._replies.clear()
        return arrived

    def wait(self, tickets: Collection[int], timeout_s: float) -> dict[int, Message]:
        """The replies of `tickets`. Once all have come, raises the error that explains the others, if there is one."""
        replies = self.gather(tickets, timeout_s)
        errors = [reply for reply in replies.values() if isinstance(reply, NereusError)]
        if errors:
            raise explain(errors)
        return {ticket: reply for ticket, reply in replies.items() if isinstance(reply, Message)}

    def gather(self, tickets: Collection[int], timeout_s: float) -> dict[int, Reply]:
        """The reply or error of each of `tickets`; of one that has not come in time, that it is late, after the others.

        `timeout_s` is the workers' own deadline for their peers, which they have some time to report. Who has died
        comes before those who wait for it in vain.
        """
        deadline_s = time.monotonic() + timeout_s + grace_s(timeout_s)
        missing = set(tickets) - set(self._replies)
        while missing and time.monotonic() < deadline_s:
            self._pump(max(0.0, deadline_s - time.monotonic()))
            missing -= set(self._replies)
        for ticket in missing:
            self._abandon(ticket, timeout_s)
        return {ticket: self._replies.pop(ticket) for ticket in sorted(tickets, key=missing.__contains__)}

    def call(self, devices: Iterable[int], message: Message, timeout_s: float) -> dict[int, Message]:
        """The same command on several devices; device → reply."""
        tickets = {device: self.submit(device, message) for device in devices}
        replies = self.wait(list(tickets.values()), timeout_s)
        return {device: replies[ticket] for device, ticket in tickets.items()}

    def settle(self, devices: Collection[int], timeout_s: float, passed_s: float = 0.0) -> None:
        """Wait until they have answered everything; a worker that has not by then is ended, and counts as lost.

        `passed_s` of the deadline are over, as of `wait`.
        """
        deadline_s = time.monotonic() + timeout_s + grace_s(timeout_s) - passed_s
        while True:
            owing = [d for d in sorted(devices) if d in self._members and self._members[d].unanswered]
            left_s = deadline_s - time.monotonic()
            if not owing or left_s <= 0:
                break
            self._pump(left_s)
        for device in owing:
            self._lose(device, f"no answer within {timeout_s:.3g} s")
        self._replies.clear()

    def stop(self, ids: Iterable[int]) -> None:
        """End workers: politely first, by their process ids after a deadline."""
        chosen = {device: self._members.pop(device) for device in sorted(set(ids)) if device in self._members}
        for device, member in chosen.items():
            for ticket in member.unanswered:
                self._answer(ticket, WorkerLostError(device, "it was stopped"))
            try:
                send(member.launched.connection, Message("stop"))
            except OSError:
                log.debug("worker of device %d had ended before it was stopped", device)
        deadline_s = time.monotonic() + STOP_S
        for member in chosen.values():
            process = member.launched.process
            if member.ready:
                process.join(max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                process.terminate()
                process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
            member.launched.connection.close()
            process.close()

    def close(self) -> None:
        """End every worker and the store. A second call does nothing."""
        self.stop(tuple(self._members))
        self._replies.clear()
        self._store = None

    def _listen(self) -> None:
        """The store hears its own address alone, not all of the machine's (D5.14)."""
        if self._store is not None:
            return
        listener = socket.create_server((self._host, 0), backlog=128)
        self._port = listener.getsockname()[1]
        self._store = distributed.TCPStore(
            self._host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def _pump(self, timeout_s: float) -> None:
        """Take in what the workers have sent, waiting for the first of it; notice processes that have ended."""
        sources: dict[Any, int] = {}
        for device, member in self._members.items():
            sources[member.launched.connection] = device
            sources[member.launched.process.sentinel] = device
        arrived = connection.wait(list(sources), timeout_s)
        for device in sorted({sources[source] for source in arrived}):
            self._take(device)

    def _take(self, device: int) -> None:
        member = self._members[device]
        try:
            while member.launched.connection.poll():
                message = receive(member.launched.connection)
                if message.name == "ready":
                    member.ready = True
                elif message.name == "failed":
                    self._lose(device, f"it did not start: {message.fields['error']}")
                    self._failed[device] = self._lost[device]
                    return
                else:
                    reply = message.fields["error"] if message.name == "error" else message
                    self._answer(member.unanswered.popleft(), reply)
        except (EOFError, OSError):
            self._lose(device)
            return
        if not member.launched.process.is_alive():
            self._lose(device)

    def _answer(self, ticket: int, reply: Reply) -> None:
        if ticket in self._abandoned:
            self._abandoned.discard(ticket)
        else:
            self._replies[ticket] = reply

    def _lose(self, device: int, reason: str | None = None) -> None:
        """A worker is gone: every reply it owes becomes a WorkerLostError."""
        member = self._members.pop(device)
        process = member.launched.process
        if reason is None:  # the pipe may close a little before the process ends
            process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()
        lost = self._lost[device] = WorkerLostError(device, reason or _ending(process.pid, process.exitcode))
        log.warning("%s", lost)
        if self._store is not None:  # peers may wait for it at the store
            tell_lost(self._store, device, str(lost))
        for ticket in member.unanswered:
            self._answer(ticket, lost)
        member.launched.connection.close()
        process.close()

    def _abandon(self, ticket: int, timeout_s: float) -> None:
        """Give up on a reply; when it still comes, it is thrown away."""
        device = next((d for d, member in self._members.items() if ticket in member.unanswered), None)
        if device is None:
            raise NereusError(f"ticket {ticket} is unknown or its reply has been taken")
        self._abandoned.add(ticket)
        self._replies[ticket] = WorkerLostError(device, f"no answer within {timeout_s:.3g} s")


def grace_s(timeout_s: float) -> float:
    """Past the deadline for its peers a worker has so long to say that it has passed."""
    return max(LEAST_GRACE_S, timeout_s / 4)


def explain(errors: Collection[NereusError]) -> NereusError:
    """The error that explains the others: a lost worker, out of memory, anything but the broken connections it left."""

    def rank(error: NereusError) -> int:
        if isinstance(error, WorkerLostError):
            return 0
        if isinstance(error, OutOfMemoryError):
            return 1
        return 3 if isinstance(error, TransportError) else 2

    return min(errors, key=rank)


def _ending(pid: int | None, exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"process {pid} was ended by {signal.Signals(-exit_code).name}"
    return f"process {pid} ended with exit code {exit_code}"
