"""A program for the tests: fills positions, reads them back, fails in several ways."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nereus.core import EMU, StateSchema
from nereus.engine.connection import Message
from nereus.engine.worker import Handler, Worker
from tests.engine.fill import local


class Filler:
    """`options` may hold `die`: (device, primitive) that kills its process when asked to apply that primitive."""

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
            "sleep": lambda message: time.sleep(message.fields["seconds"]),
            "groups.names": lambda _: Message("names", {"names": self.worker.groups.names}),
        }
        if "die" in self.options:
            found["transition.apply"] = self.apply_or_die
        return found

    def apply_or_die(self, message: Message) -> Message | None:
        if self.options["die"] == (self.worker.device, message.fields["primitive"]):
            time.sleep(0.3)  # the peers are waiting by now
            os.kill(os.getpid(), signal.SIGKILL)
        return self.worker.handlers()["transition.apply"](message)

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
