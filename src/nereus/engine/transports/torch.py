"""Moves byte buffers between devices over a group of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nereus.core import TransportError
from nereus.engine.groups import Group


class Torch:
    """The `Transport` port on a group. Buffers are contiguous tensors; devices are named by id."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ranks = {device: rank for rank, device in enumerate(group.members)}

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send each (target, buffer), fill each (source, buffer)."""
        self._group.exchange(
            [(self._rank(device), buffer) for device, buffer in sends],
            [(self._rank(device), buffer) for device, buffer in receives],
        )

    def _rank(self, device: int) -> int:
        if device not in self._ranks:
            raise TransportError(f"group {self._group.name} has no device {device}, its members: {list(self._ranks)}")
        return self._ranks[device]
