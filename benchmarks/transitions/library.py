"""Our side as a framework uses it: boxes told by hand, routes planned before the clock starts, one standing group."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.transitions.scenario import Scenario
from benchmarks.transitions.state import KINDS, Size, State, Units, filled, wrong
from nereus.engine.library import LogicalTensor, Options, Placement, Region, allocate, plan_routes, reshard, staying


class Work:
    """`reshard` of the engine's library; the target is allocated inside the clock."""

    options = Options()

    def __init__(self, rank: int, scenario: Scenario) -> None:
        self.rank, self.size, self.placed = rank, scenario.size, scenario.placed
        names = [(tensor, kind) for tensor in scenario.size.tensors for kind in KINDS]
        self.tensors = {f"{t.name} {kind}": LogicalTensor(f"{t.name} {kind}", t.shape, "float32") for t, kind in names}
        ranks = range(scenario.devices)
        source, self.placement = (placement(scenario.size, u, ranks) for u in (scenario.source, self.placed))
        self.plan = plan_routes(self.tensors.values(), source, self.placement)
        self.source = {f"{name} {kind}": part for (name, kind), part in self._filled(scenario).items()}
        self.keep = staying(self.plan, self.source, rank)  # as the direct exchange keeps them: views, not copies
        self.target: dict[str, torch.Tensor] = {}
        self.more: dict[str, Any] = {}

    def _filled(self, scenario: Scenario) -> State:
        return filled(scenario.size, scenario.source, self.rank)

    def reset(self) -> None:
        """Drop the target."""
        self.target = {}

    def run(self) -> None:
        """Allocate, move, agree."""
        self.target = allocate(self.tensors, self.placement, self.rank, keep=self.keep)
        self.move()

    def move(self) -> None:
        """Fill the target."""
        report = reshard(self.plan, self.source, self.target, options=self.options)
        self.more = {"received_bytes": sum(self.plan.received_bytes.values()), "staging_bytes": report.staging_bytes}

    def wrong(self) -> list[str]:
        """Of the target."""
        state = {(name.split(" ")[0], name.split(" ")[1]): part for name, part in self.target.items()}
        return wrong(state, self.size, self.placed, self.rank)


class InPlace(Work):
    """The target's tensors exist before the clock starts and are received into, as in a model that is already built."""

    def __init__(self, rank: int, scenario: Scenario) -> None:
        super().__init__(rank, scenario)
        self.ready = allocate(self.tensors, self.placement, self.rank, keep=self.keep)
        for name, part in self.ready.items():
            if name not in self.keep:
                part.fill_(-1.0)

    def run(self) -> None:
        """Move, agree."""
        self.target = self.ready
        self.move()


class Sent(Work):
    """All state goes over the loopback, as everybody else's does."""

    options = Options(read_memory=False)


class SentInPlace(InPlace):
    """The same into tensors that are there."""

    options = Options(read_memory=False)


def placement(size: Size, units: Units, ranks: range) -> Placement:
    """Every rank's boxes."""
    boxes: dict[str, dict[int, Region]] = {}
    for rank in ranks:
        for tensor, start, stop in units.held(size, rank):
            box = Region.whole(tensor.shape)
            if tensor.dim is not None:
                box = Region.along(tensor.shape, tensor.dim, start, stop)
            for kind in KINDS:
                boxes.setdefault(f"{tensor.name} {kind}", {})[rank] = box
    return Placement(boxes)
