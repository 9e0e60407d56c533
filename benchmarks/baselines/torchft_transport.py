"""torchft's in-place recovery over a process group: a rank that has a shard sends it to one that has none.

It knows one layout only, so it does what an Extend does when every target wants one source's shard whole.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed
from torchft.checkpointing.pg_transport import PGTransport

from benchmarks.transitions.scenario import Scenario
from benchmarks.transitions.state import State, filled, wrong

WAIT = timedelta(seconds=60)


class Work:
    """The target's tensors exist before the clock starts and are received into."""

    def __init__(self, rank: int, scenario: Scenario) -> None:
        self.rank, self.scenario, self.placed = rank, scenario, scenario.placed
        pairs = sorted((source, target) for target, source in scenario.copies().items())
        self.to = [target for source, target in pairs if source == rank]
        self.source = next((source for source, target in pairs if target == rank), None)
        self.state: State = filled(scenario.size, self.placed, rank)
        if self.source is not None:
            self.state = {key: torch.full_like(part, -1.0) for key, part in self.state.items()}
        group = distributed.group.WORLD
        held = None if self.source is None else self._named
        self.transport = PGTransport(group, WAIT, torch.device("cpu"), state_dict=held)
        self.step = 0

    def _named(self) -> dict[str, torch.Tensor]:
        return {f"{name} {kind}": part for (name, kind), part in self.state.items()}

    def reset(self) -> None:
        """The target is overwritten."""
        self.step += 1

    def run(self) -> None:
        """Send or receive."""
        if self.to:
            self.transport.send_checkpoint(self.to, self.step, self._named(), WAIT)
        if self.source is not None:
            self.transport.recv_checkpoint(self.source, "<n/a>", self.step, WAIT)

    def wrong(self) -> list[str]:
        """Of the target."""
        return wrong(self.state, self.scenario.size, self.placed, self.rank)
