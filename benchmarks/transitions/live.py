"""Our side as a job uses it: live positions of workers, the coordinator's executor, groups made and dropped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.transitions.ranks import WAIT_S, Meter
from benchmarks.transitions.scenario import Scenario
from benchmarks.transitions.state import KINDS, Size, Units, values, wrong
from nereus.core import (
    EMU,
    Assignment,
    Candidate,
    Cut,
    EMUSet,
    Kind,
    Layout,
    LogicalState,
    ModelStage,
    Plan,
    Stage,
    StateSchema,
    TensorSpec,
    TransitionDAG,
    Where,
)
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.engine.executor import TransitionExecutor
from nereus.engine.worker import DeviceSettings, Handler, Worker
from nereus.transition import connect, place
from nereus.transition.budget import Budget

MODEL_STAGE = ModelStage("actor", Stage.TRAINING)
PROGRAM = "benchmarks.transitions.live.Program"
ROOM_BYTES = 1 << 40
"""Memory is not what is compared here."""


class Program:
    """A worker's handlers beside the engine's own: fill a position, compare it, meter the process."""

    def __init__(self, worker: Worker, _: Any) -> None:
        self.worker = worker
        self.meter = Meter()

    def handlers(self) -> Mapping[str, Handler]:
        """Command name → function."""
        return {
            "bench.load": self.load,
            "bench.units": self.units,
            "bench.meter": self.start,
            "bench.read": self.read,
            "bench.clear": lambda _: self.worker.positions.clear(),
            "bench.group": self.make_group,
            "bench.copy": self.copy,
            "bench.destroy": self.destroy,
        }

    def load(self, message: Message) -> None:
        """A live position with the contents that everybody can compute."""
        unit: EMU = message.fields["unit"]
        position = self.worker.positions.create(unit, message.fields["schema"])
        for tensor, start, stop in as_units((unit,)).held(message.fields["size"], self.worker.device):
            for kind in KINDS:
                position.tensors[tensor.name, Kind(kind)].copy_(values(tensor, kind, start, stop))
        position.logical = LogicalState(1)

    def units(self, message: Message) -> Message:
        """The units of this device's positions, and what of them differs."""
        names, found = [], list(self.worker.positions)
        for position in found:
            state = {(name, str(kind)): part for (name, kind), part in position.tensors.items()}
            size = message.fields["sizes"][position.unit.model_stage]
            names += wrong(state, size, as_units((position.unit,)), self.worker.device)
        return Message("units", {"names": names, "units": [position.unit for position in found]})

    def make_group(self, message: Message) -> None:
        """One group of all devices, in place of the last."""
        self.worker.groups.drop_all()
        self.group = self.worker.groups.make(message.fields["name"], message.fields["members"])

    def copy(self, message: Message) -> None:
        """Send a position of a unit as it is, or make one like it and receive."""
        source, target = message.fields["source"].devices, message.fields["target"].devices
        if self.worker.device in source:
            unit, peer = message.fields["source"], target[source.index(self.worker.device)]
        else:
            unit, peer = message.fields["target"], source[target.index(self.worker.device)]
            self.worker.positions.create(unit, message.fields["schema"])
        tensors = self.worker.positions[unit.model_stage].tensors
        move = self.group.isend if self.worker.device in source else self.group.irecv
        rank = self.group.members.index(peer)
        for handle in [move(tensor, rank) for tensor in tensors.values()]:
            handle.wait()

    def destroy(self, message: Message) -> None:
        """Let go of a unit."""
        self.worker.positions.destroy(message.fields["unit"])

    def start(self, _: Message) -> None:
        """Begin to count."""
        self.worker.ledger.reset_peak()
        self.meter = Meter()
        self.used_bytes = self.worker.ledger.used_bytes

    def read(self, _: Message) -> Message:
        """Since `start`."""
        ledger = self.worker.ledger.peak_bytes - self.used_bytes
        return Message("read", {**self.meter.read(), "ledger_extra_bytes": ledger})


class Side:
    """A crew with the source on it. A run is one transition; the way back is another that is not timed."""

    read_memory = True

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.devices = scenario, range(scenario.devices)
        self.schemas = {MODEL_STAGE: schema(scenario.size)}
        limits = DeviceSettings(read_memory=self.read_memory)
        self.crew = Crew(dict.fromkeys(self.devices, limits), PROGRAM, timeout_s=WAIT_S)
        self.crew.start(self.devices)
        self.crew.wait_ready(self.devices, WAIT_S)
        self.start = EMUSet(emus(scenario.source))
        for unit in self.start:
            fields = {"unit": unit, "schema": self.schemas[MODEL_STAGE], "size": scenario.size}
            self.crew.call(unit.devices, Message("bench.load", fields), WAIT_S)
        target = scenario.target
        candidate = Candidate(MODEL_STAGE, Layout(target.tp, target.pp), len(target.devices))
        self.goal = place(self.start, Plan((Assignment(candidate, target.devices),)), self.schemas)
        self.executor = TransitionExecutor(self.crew, self.schemas, WAIT_S)
        self.there, self.back = self._dag(self.start, self.goal), self._dag(self.goal, self.start)

    def once(self) -> dict[str, Any]:
        """One transition."""
        self.crew.call(self.devices, Message("bench.meter"), WAIT_S)
        began_s = time.perf_counter()
        outcome = self._go(self.there)
        seconds = time.perf_counter() - began_s
        reports = [
            reply.fields for _, reply in sorted(self.crew.call(self.devices, Message("bench.read"), WAIT_S).items())
        ]
        return {
            "seconds": seconds,
            "written_bytes": sum(report["written_bytes"] for report in reports),
            "extra_bytes": [report["extra_bytes"] for report in reports],
            "ledger_extra_bytes": [report["ledger_extra_bytes"] for report in reports],
            "received_bytes": sum(outcome.received_bytes.values()),
            "sent_bytes": dict(Counter(outcome.sent_bytes)),
        }

    def wrong(self) -> list[str]:
        """Of the target, on any device."""
        fields = {"sizes": {MODEL_STAGE: self.scenario.size}}
        replies = self.crew.call(self.devices, Message("bench.units", fields), WAIT_S)
        found = [f"device {device}: {name}" for device, reply in replies.items() for name in reply.fields["names"]]
        held = {device for device, reply in replies.items() if reply.fields["units"]}
        return [*found, *(f"device {device} holds nothing" for device in sorted(self.goal.devices - held))]

    def rest(self) -> None:
        """Back to the source."""
        self._go(self.back)

    def close(self) -> None:
        """End the workers."""
        self.crew.close()

    def _go(self, dag: TransitionDAG) -> Any:
        outcome = self.executor.execute(dag)
        if outcome.error is not None:
            raise RuntimeError(outcome.error)
        return outcome

    def _dag(self, start: EMUSet, goal: EMUSet) -> TransitionDAG:
        return connect(start, goal, self.schemas, Budget(dict.fromkeys(self.devices, ROOM_BYTES)))


class Sent(Side):
    """All state goes over the loopback, as everybody else's does."""

    read_memory = False


def schema(size: Size) -> StateSchema:
    """The same tensors in the engine's words."""
    tensors = []
    for tensor in size.tensors:
        where = Where.LAST if tensor.layer is None else Where.FIRST if tensor.layer < 0 else Where.LAYER
        layer = tensor.layer if where == Where.LAYER else None
        cut = Cut() if tensor.dim is None else Cut(tensor.dim, tensor.shape[tensor.dim])
        tensors.append(TensorSpec(tensor.name, tensor.shape, where, layer, cut))
    return StateSchema(size.layers, tuple(tensors), {Kind(kind): "fp32" for kind in KINDS})


def emus(units: Units) -> tuple[EMU, ...]:
    """The same units in the engine's words."""
    return tuple(EMU(MODEL_STAGE, Layout(units.tp, units.pp), devices) for devices in units.devices)


def as_units(found: tuple[EMU, ...]) -> Units:
    """And back."""
    return Units(found[0].layout.tp, found[0].layout.pp, tuple(unit.devices for unit in found))
