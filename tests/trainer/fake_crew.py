"""A crew without processes: devices that answer by a function, one command each per poll, in order."""

# ruff: noqa: ARG002
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from nereus.core import EMU, WorkerLostError
from nereus.engine.connection import Message
from nereus.engine.crew import Crew, Reply

Answer = Callable[[int, Message], Reply]


class FakeCrew(Crew):
    """`sent` are all commands in the order they were given; devices in `dead` take none."""

    def __init__(self, answer: Answer | None = None, devices: Iterable[int] = range(8)) -> None:
        super().__init__({}, "none")
        self.answer = answer or (lambda _, message: Message(message.name))
        self.devices = frozenset(devices)
        self.dead: set[int] = set()
        self.sent: list[tuple[int, Message]] = []
        self.queues: dict[int, deque[tuple[int, Message]]] = {device: deque() for device in self.devices}

    def ready(self) -> frozenset[int]:
        return self.devices - self.dead

    started = ready

    def start(self, ids: Iterable[int]) -> None:
        assert set(ids) <= self.devices

    def submit(self, device: int, message: Message) -> int:
        if device in self.dead:
            raise WorkerLostError(device, "it is dead")
        self._tickets += 1
        self.sent.append((device, message))
        self.queues[device].append((self._tickets, message))
        return self._tickets

    def poll(self, timeout_s: float) -> list[tuple[int, Reply]]:
        heads = [(device, *queue.popleft()) for device, queue in self.queues.items() if queue]
        return [(ticket, self.answer(device, message)) for device, ticket, message in heads]

    def call(self, devices: Iterable[int], message: Message, timeout_s: float) -> dict[int, Message]:
        replies: dict[int, Message] = {}
        for device in devices:
            if device in self.dead:
                raise WorkerLostError(device, "it is dead")
            self.sent.append((device, message))
            reply = self.answer(device, message)
            if not isinstance(reply, Message):
                raise reply
            replies[device] = reply
        return replies

    def outstanding(self) -> int:
        """Commands that have not been answered."""
        return sum(map(len, self.queues.values()))

    def commands(self, name: str) -> list[tuple[int, Message]]:
        """Device and message of every command of one name."""
        return [(device, message) for device, message in self.sent if message.name == name]


def imitate(device: int, message: Message) -> Message:
    """What a worker of the built-in job would send back, with numbers that depend on the samples alone."""
    fields: dict[str, Any] = dict(message.fields)
    arrays: dict[str, Any] = {}
    if message.name == "memory":
        return Message("memory", {"peak_bytes": 1000 + device})
    unit: EMU | None = fields.get("unit")
    if unit is None or device != unit.entry_device:
        return Message(message.name, {"meter": {"forward": 1.0}})
    if message.name == "generate":
        ids = message.arrays["sample_ids"]
        lengths = ids % 3 + 1
        arrays = {"tokens": np.repeat(ids[:, None] + 4, 3, axis=1), "lengths": lengths}
    elif message.name == "forward":
        rows, width = message.arrays["response_tokens"].shape
        first = message.arrays["response_tokens"][:, :1].astype(np.float64)
        arrays = {n: first[:, 0] if n == "scores" else np.repeat(first, width, axis=1) for n in fields["outputs"]}
        assert all(len(array) == rows for array in arrays.values())
    extra = {"sums": {"pg_loss": 1.0}, "grad_norm": 2.0} if message.name == "update.prepare" else {}
    return Message("done", {"meter": {"forward": 1.0}, **extra}, arrays)
