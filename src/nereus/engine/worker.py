"""One worker process: a device with its groups, memory and positions, and a program that carries out commands."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import distributed

from nereus.core import NereusError, TransitionError, plugins
from nereus.engine.apply import Transition
from nereus.engine.connection import Message, receive, send
from nereus.engine.groups import GroupRegistry
from nereus.engine.ledger import CudaLedger, Ledger
from nereus.engine.pacer import Meter, Pacer, device_clock
from nereus.engine.positions import Positions

log = logging.getLogger(__name__)

Handler = Callable[[Message], Message | None]


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """One device of a crew. `capacity_bytes` None: no limit; `speed`: share of a core (D5.11)."""

    capacity_bytes: int | None = None
    speed: float = 1.0
    torch_device: str = "cpu"
    read_memory: bool = True
    """Whether state is read from the memory of peers on this host (Linux, CPU), instead of being sent."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """All that a worker process is told when it starts. `program` is the dotted name of a `Program`."""

    device: int
    limits: DeviceSettings
    timeout_s: float
    program: str
    options: Any
    store_host: str
    store_port: int


class Program(Protocol):
    """What a worker is for. Its handlers' names must differ from the engine's own."""

    def __init__(self, worker: Worker, options: Any) -> None: ...

    def handlers(self) -> Mapping[str, Handler]:
        """Command name → function that carries it out; None as a reply means done."""
        ...


class Worker:
    """What a program may use."""

    def __init__(self, settings: WorkerSettings) -> None:
        limits = settings.limits
        self.device = settings.device
        self.timeout_s = settings.timeout_s
        self.torch_device = torch.device(limits.torch_device)
        cuda = self.torch_device.type == "cuda"
        if cuda:  # buffers, NCCL and clocks are those of the current device; a peer's error must not end this process
            torch.cuda.set_device(self.torch_device)
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        store = distributed.TCPStore(
            settings.store_host,
            settings.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=settings.timeout_s),
        )
        self.groups = GroupRegistry(
            store, settings.device, settings.timeout_s, cuda, settings.store_host, limits.read_memory
        )
        self.ledger = (
            CudaLedger(settings.device, limits.capacity_bytes, self.torch_device.index or 0)
            if cuda
            else Ledger(settings.device, limits.capacity_bytes)
        )
        self.meter = Meter(limits.speed, device_clock) if cuda else Meter(limits.speed)
        self.pacer = Pacer(limits.speed, self.meter)
        self.positions = Positions(settings.device, self.ledger, self.torch_device)
        self._transition = Transition(self)

    def handlers(self) -> dict[str, Handler]:
        """The engine's own commands."""
        return {
            "groups.make": self._make_groups,
            "groups.drop": self._drop_groups,
            "groups.reset": self._reset_groups,
            "memory": self._memory,
            "reset_peak": self._reset_peak,
            **self._transition.handlers(),
        }

    def _make_groups(self, message: Message) -> None:
        """Make each of `groups` (name, members) that this device belongs to, in the order given."""
        for name, members in message.fields["groups"]:
            if self.device in members:
                self.groups.make(name, members)

    def _drop_groups(self, message: Message) -> None:
        for name in message.fields["names"]:
            self.groups.drop(name)

    def _reset_groups(self, _: Message) -> None:
        self.groups.drop_all()

    def memory(self) -> dict[str, Any]:
        """What the ledger holds now and held at its peak."""
        return {
            "used_bytes": self.ledger.used_bytes,
            "peak_bytes": self.ledger.peak_bytes,
            "capacity_bytes": self.ledger.capacity_bytes,
            "by_category": self.ledger.by_category(),
            "host_bytes": self.positions.host.used_bytes,
        }

    def _memory(self, message: Message) -> Message:
        report = self.memory()
        if message.fields.get("reset_peak"):
            self.ledger.reset_peak()
        return Message("memory", report)

    def _reset_peak(self, _: Message) -> None:
        self.ledger.reset_peak()


def run_worker(settings: WorkerSettings, connection: Connection) -> None:
    """Entry of a worker process: start, report ready, carry out commands until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator ends its workers
    torch.set_num_threads(1)
    inbox: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    try:
        worker = Worker(settings)
        program = plugins.dotted(settings.program)(worker, settings.options)
        handlers = worker.handlers() | program.handlers()
        _warm_up(worker.torch_device)
    except Exception as error:
        send(connection, Message("failed", {"error": _reportable(settings.device, "start", error)}))
        return
    send(connection, Message("ready"))
    while True:
        message = inbox.get()
        if message.name == "stop":
            break
        reply = _carry_out(worker, handlers, message)
        try:
            send(connection, reply)
        except OSError:  # the coordinator is gone
            break
        del message, reply
    worker.groups.drop_all()


def _read(connection: Connection, inbox: SimpleQueue[Message]) -> None:
    """Only reads, so that the coordinator never waits to be heard; ends the process when the coordinator is gone."""
    try:
        while True:
            inbox.put(receive(connection))
    except (EOFError, OSError):
        os._exit(1)


def _carry_out(worker: Worker, handlers: Mapping[str, Handler], message: Message) -> Message:
    """The reply to one command. After an error no group is left, or peers would wait for this worker (D5.5)."""
    worker.pacer.start()
    try:
        if message.name not in handlers:
            raise NereusError(f"command {message.name!r} is unknown, valid: {', '.join(sorted(handlers))}")
        return handlers[message.name](message) or Message(message.name)
    except Exception as error:
        worker.groups.drop_all()
        reply = Message("error", {"error": _reportable(worker.device, message.name, error)})
    gc.collect()  # the traceback held tensors of the failed command
    return reply


def _reportable(device: int, command: str, error: Exception) -> NereusError:
    """An error that can cross the pipe: ours as they are, others by name."""
    if isinstance(error, NereusError):
        log.info("device %d: %s: %s", device, command, error)
        return error.with_traceback(None)
    log.error("device %d: %s failed\n%s", device, command, "".join(traceback.format_exception(error)))
    kind = TransitionError if command.startswith("transition.") else NereusError
    return kind(f"device {device}: {command} failed: {type(error).__name__}: {error}")


def _warm_up(device: torch.device) -> None:
    """What torch does once per process is done before the worker counts as ready."""
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    torch.nn.functional.silu(weight @ weight).sum().backward()
    torch.optim.AdamW([weight], lr=1e-3).step()
