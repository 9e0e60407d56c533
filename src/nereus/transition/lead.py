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
        """Units that leave before the groups on their devices are built, so that none reads them there.

        Where the lead builds nothing they may be read as long as they are there.
        """
        groups = [step for step in self.steps if not isinstance(step, EMU)]
        read = {(ms, device): False for ms, devices in groups for device in devices}
        """Model-stage and a device on which it is built → whether a unit there has been read."""
        for step in self.steps:
            if not isinstance(step, EMU):
                read.update({(step[0], device): True for device in step[1]})
                continue
            there = [read[step.model_stage, device] for device in step.devices if (step.model_stage, device) in read]
            if there and not any(there):
                yield step
        yield from self.offloaded
