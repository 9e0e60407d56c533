"""A way that is known to fit, to be gone before everything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nereus.core import EMU, ModelStage

GroupName = tuple[ModelStage, frozenset[int]]
"""A commit group: its model-stage and the devices it builds on."""


@dataclass(frozen=True, slots=True)
class Lead:
    """Units that go to host memory, then units that leave and groups that are built, in this order.

    A unit leaves only when a later group waits for its memory.
    """

    offloaded: tuple[EMU, ...]
    steps: tuple[EMU | GroupName, ...]

    @property
    def unread(self) -> Iterator[EMU]:
        """Units that no group reads on their own devices."""
        read: dict[ModelStage, set[int]] = {}
        for step in self.steps:
            if isinstance(step, EMU):
                if read.get(step.model_stage, set()).isdisjoint(step.devices):
                    yield step
            else:
                read.setdefault(step[0], set()).update(step[1])
        yield from self.offloaded
