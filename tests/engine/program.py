"""A program for the tests: fills positions, reads them back, fails in several ways."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from nereus.core import EMU, Kind, StateSchema
from nereus.engine.connection import Message
from nereus.engine.worker import Handler, Worker
from tests.engine.fill import local


@dataclass(frozen=True, slots=True)
class Fault:
    """A device's process gets a signal at a command, of one primitive where that is given; or spoils a tensor."""

    device: int
    command: str
    primitive: str | None = None
    signal: int = signal.SIGKILL
    after: bool = False
    spoils: tuple[str, Kind] | None = None


def late(waits: random.Random, act: Handler, message: Message) -> Message | None:
    """Carry out a command a little later."""
    time.sleep(waits.uniform(0, 0.02))
    return act(message)


class Filler:
    """`options` may hold `fault`, a `Fault`, and `delays`: a seed of short random waits before every command."""

    def __init__(self, worker: Worker, options: Any) -> None:
        if options == "broken":
            raise RuntimeError("no such model")
        self.worker = worker
        self.options = options or {}

    def handlers(self) -> Mapping[str, Handler]:
        found: dict[str, Handler] = {
            "echo": lambda message: message,
            "spend": self.spend,
            "crash": self.crash,
            "bug": self.bug,
            "hoard": self.hoard,
            "sum": self.sum,
            "load": self.load,
            "read": self.read,
            "spoil": self.spoil,
            "sleep": lambda message: time.sleep(message.fields["seconds"]),
            "groups.names": lambda _: Message("names", {"names": self.worker.groups.names}),
        }
        fault: Fault | None = self.options.get("fault")
        own = self.worker.handlers()
        if "delays" in self.options:
            waits = random.Random(f"{self.options['delays']} {self.worker.device}")
            found |= {name: partial(late, waits, act) for name, act in own.items() if name.startswith("transition.")}
        if fault is not None and fault.device == self.worker.device:
            found[fault.command] = partial(self.faulty, fault, own[fault.command])
        return found

    def faulty(self, fault: Fault, act: Handler, message: Message) -> Message | None:
        """Carry out a command, with the fault before or after it."""
        if fault.primitive not in (None, message.fields.get("primitive")):
            return act(message)
        reply = act(message) if fault.after else None
        if fault.spoils is not None:
            self.spoil(Message("spoil", {"key": fault.spoils}))
            return reply
        time.sleep(0.2)  # the peers are waiting by now
        os.kill(os.getpid(), fault.signal)
        return reply

    def spoil(self, message: Message) -> None:
        """Change one element of a tensor (name, kind) in every position that holds it, not yet committed ones too."""
        for position in (*self.worker.positions, *self.worker.positions._pending.values()):
            if message.fields["key"] in position.tensors:
                position.tensors[message.fields["key"]].view(-1)[0] += 1

    def spend(self, message: Message) -> Message:
        """Use CPU in small pieces, pacing after each."""
        began_cpu_s, began_s = time.process_time(), time.perf_counter()
        while time.process_time() - began_cpu_s < message.fields["cpu_s"]:
            with self.worker.meter.computing("spin"):
                sum(range(20_000))
            self.worker.pacer.pace()
        return Message("spent", {"cpu_s": time.process_time() - began_cpu_s, "wall_s": time.perf_counter() - began_s})

    def crash(self, _: Message) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def bug(self, _: Message) -> None:
        raise ZeroDivisionError("a bug in a handler")

    def hoard(self, message: Message) -> None:
        self.worker.ledger.hold("kv_cache", torch.zeros(message.fields["bytes"], dtype=torch.uint8))

    def sum(self, message: Message) -> Message:
        tensor = torch.from_numpy(message.arrays["values"].copy())
        self.worker.groups.get(message.fields["group"]).all_reduce(tensor)
        return Message("sum", {}, {"values": tensor.numpy()})

    def load(self, message: Message) -> None:
        unit: EMU = message.fields["unit"]
        schema: StateSchema = message.fields["schema"]
        position = self.worker.positions.create(unit, schema)
        for (name, kind), values in local(schema, unit, self.worker.device).items():
            position.tensors[name, kind].copy_(values)
        position.logical = message.fields["logical"]

    def read(self, _: Message) -> Message:
        """Every live position: its unit and counters, and its tensors as bytes."""
        positions = list(self.worker.positions)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for position in positions:
            for (name, kind), tensor in position.tensors.items():
                key = f"{position.unit.model_stage} {name} {kind}"
                arrays[key] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        held = {p.unit.model_stage: (p.unit, p.logical) for p in positions}
        return Message("state", {"held": held}, arrays)
