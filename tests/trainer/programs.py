"""Workers of the built-in job that can be looked into, and ones that fail where a test wants them to."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nereus.core import OutOfMemoryError, TransitionError
from nereus.engine.connection import Message
from nereus.engine.worker import Handler, Worker
from nereus.trainer.program import Options, TrainerProgram
from tests.oracles.storages import live_storages

READER = "tests.trainer.programs.Reader"
SAMPLER = "tests.trainer.programs.Sampler"
COUNTER = "tests.trainer.programs.Counter"
BUSY_CRITIC = "tests.trainer.programs.BusyCritic"
DIES_IN_COMMIT = "tests.trainer.programs.DiesInCommit"
DIES_IN_TRANSITION = "tests.trainer.programs.DiesInTransition"
FAILS_IN_SYNC = "tests.trainer.programs.FailsInSync"
SYNC_WAITS = "tests.trainer.programs.SyncWaits"
SPOILS_SYNC = "tests.trainer.programs.SpoilsSync"
FAILS_IN_TRANSITION = "tests.trainer.programs.FailsInTransition"


class Reader(TrainerProgram):
    """`read` answers with every live position: its unit, its counters, and its tensors as bytes."""

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), "read": self._read}

    def _read(self, _: Message) -> Message:
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        held = {}
        for position in self._worker.positions:
            ms = position.unit.model_stage
            held[ms] = (position.unit, position.logical)
            for (name, kind), tensor in position.tensors.items():
                arrays[f"{ms} {name} {kind}"] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return Message("state", {"held": held}, arrays)


class Counter(TrainerProgram):
    """Notes what the ledger says and what an independent count finds: after each micro-batch or token, and each hold.

    `counted` answers with (ledger, count) pairs by command.
    """

    def __init__(self, worker: Worker, options: Options) -> None:
        super().__init__(worker, options)
        self._command = ""
        self._pairs: dict[str, list[tuple[int, int]]] = {}
        gc.freeze()  # what is there by now is no part of the job, and is not walked again
        worker.pacer.pace = self._noting(worker.pacer.pace)  # type: ignore[method-assign]
        worker.ledger.hold = self._noting(worker.ledger.hold)  # type: ignore[method-assign]

    def handlers(self) -> Mapping[str, Handler]:
        found = dict(super().handlers())
        watched = {name: found[name] for name in ("generate", "update.prepare", "update.commit")}
        watched["transition.apply"] = self._worker.handlers()["transition.apply"]
        return {
            **found,
            **{name: self._during(name, handler) for name, handler in watched.items()},
            "counted": lambda _: Message("counted", {"pairs": self._pairs}),
        }

    def _during(self, name: str, handler: Handler) -> Handler:
        def carry_out(message: Message) -> Message | None:
            self._command = name
            try:
                return handler(message)
            finally:
                self._command = ""

        return carry_out

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            result = function(*arguments)
            if self._command:
                found = sum(live_storages().values())
                self._pairs.setdefault(self._command, []).append((self._worker.ledger.used_bytes, found))
            return result

        return noted


class BusyCritic(TrainerProgram):
    """The critic runs out of memory once, in its second update, while the actor's first is being committed."""

    _failed = False

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), "update.prepare": self._prepare_or_fail, "update.commit": self._commit_slowly}

    def _prepare_or_fail(self, message: Message) -> Message:
        if message.fields["call"] == "update_critic" and message.fields["update"] == 1 and not self._failed:
            self._failed = True
            raise OutOfMemoryError(self._worker.device, 80, 40, 100, "activations")
        return self._prepare(message)

    def _commit_slowly(self, message: Message) -> Message:
        if message.fields["call"] == "update_actor":
            time.sleep(0.5)
        return self._commit(message)


class DiesInCommit(TrainerProgram):
    """Device 1 is killed when it is to apply the actor's second update."""

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), "update.commit": self._commit_or_die}

    def _commit_or_die(self, message: Message) -> Message:
        if message.fields["call"] == "update_actor" and message.fields["update"] == 1 and self._worker.device == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._commit(message)


class Sampler(TrainerProgram):
    """`seen` answers with the sample ids that it generated for, and the prompts that it trained on, since the last."""

    def __init__(self, worker: Worker, options: Options) -> None:
        super().__init__(worker, options)
        self._ids: list[int] = []
        self._prompts: list[list[int]] = []

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), "generate": self._noted, "update.prepare": self._trained, "seen": self._seen}

    def _noted(self, message: Message) -> Message:
        self._ids += message.arrays["sample_ids"].tolist()
        return self._generate(message)

    def _trained(self, message: Message) -> Message:
        self._prompts += message.arrays["prompt_tokens"].tolist()
        return self._prepare(message)

    def _seen(self, _: Message) -> Message:
        found, self._ids, self._prompts = (self._ids, self._prompts), [], []
        return Message("seen", dict(zip(("ids", "prompts"), found, strict=True)))


class FailsInTransition(Reader):
    """Device 3 fails in its first step of a transition."""

    _tries = 0

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), "transition.apply": self._apply}

    def _apply(self, message: Message) -> Message | None:
        if self._worker.device == 3:
            self._tries += 1
            if self._tries == 1:
                self.fail()
        return self._worker.handlers()["transition.apply"](message)

    def fail(self) -> None:
        raise TransitionError("device 3: injected")


class DiesInTransition(FailsInTransition):
    """Device 3 is killed in its first step of a transition."""

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FailsInSync(Reader):
    """Device 2 raises once it has its part of the weights, while others wait for what it passes on."""

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), "sync": self._sync_or_fail}

    def _sync_or_fail(self, message: Message) -> Message:
        if self._worker.device == 2:
            hold, held = self._worker.ledger.hold, []

            def second(*arguments: Any) -> Any:
                held.append(arguments)
                if len(held) == 2:
                    raise TransitionError("device 2: no room for what it passes on")
                return hold(*arguments)

            self._worker.ledger.hold = second  # type: ignore[assignment, method-assign]
        return self._sync(message)


class SyncWaits(Reader):
    """Device 1 receives weights only once the critic has made its last update, and that only once device 1 waits."""

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), "sync": self._sync_late, "update.commit": self._commit_late}

    def _sync_late(self, message: Message) -> Message:
        if self._worker.device == 1:
            self._file("waits").touch()
            self._wait("updated")
        return self._sync(message)

    def _commit_late(self, message: Message) -> Message:
        last = message.fields["update"] == self._config.workload.updates - 1
        if message.fields["call"] != "update_critic" or not last:
            return self._commit(message)
        self._wait("waits")
        reply = self._commit(message)
        self._file("updated").touch()
        return reply

    def _wait(self, name: str) -> None:
        ends_s = time.monotonic() + 30
        while not self._file(name).exists():
            if time.monotonic() > ends_s:
                raise TransitionError(f"device {self._worker.device}: nothing else happens while it waits: {name}")
            time.sleep(0.01)

    def _file(self, name: str) -> Path:
        return Path(self._config.models["actor"].path).parent / name


class SpoilsSync(Reader):
    """Device 3 has one parameter wrong after a synchronisation."""

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), "sync": self._sync_badly}

    def _sync_badly(self, message: Message) -> Message:
        reply = self._sync(message)
        if self._worker.device == 3:
            position = self._worker.positions[message.fields["targets"][0].model_stage]
            next(tensor for (name, _), tensor in position.tensors.items() if "norm" in name).view(-1)[0] += 1
        return reply
