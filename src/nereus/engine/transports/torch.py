"""Moves byte buffers between the members of a group of the engine, until a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from nereus.core import NereusError, TransportError
from nereus.engine.groups import Group, Handle

Buffers = Sequence[tuple[int, torch.Tensor]]
SLOWEST_BYTES_PER_S = 50e6
"""A device that moves bytes more slowly than this is taken for lost."""


class Torch:
    """The `Transport` port on a group. Buffers are contiguous tensors; ranks are those of the group.

    `neighbours` knows who may read whose memory; None where all is sent.
    """

    def __init__(self, group: Group, timeout_s: float, read_memory: bool = True) -> None:
        self.group = group
        self.neighbours = group.neighbours if read_memory else None
        self.rank, self.size = group.rank, group.size
        self.device = torch.device("cuda", torch.cuda.current_device()) if group.on_cuda else torch.device("cpu")
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(0.0, self._deadline_s - time.monotonic())

    def restart(self) -> None:
        """The whole time again, for the same work another time."""
        self._deadline_s = time.monotonic() + self._timeout_s

    def extend(self, seconds: float) -> None:
        """More time, for more bytes."""
        self._deadline_s += seconds
        self._timeout_s += seconds

    def post(self, sends: Buffers, receives: Buffers) -> tuple[list[Handle], list[NereusError]]:
        """Start to send and receive buffers; and what could not be started: a lost peer stops no other."""
        calls: list[tuple[Buffers, Buffers]] = [(sends, receives)]
        if self.device.type != "cuda":
            calls = [*(([], [each]) for each in receives), *(([each], []) for each in sends)]
        handles: list[Handle] = []
        errors: list[NereusError] = []
        for out, inward in calls:
            try:
                handles += self.group.post(out, inward)
            except TransportError as error:
                errors.append(error)
        return handles, errors

    def wait(self, handle: Handle, what: str) -> None:
        """Until the deadline at most; TransportError says what was waited for."""
        try:
            handle.wait(self.left_s)
        except TransportError as error:
            late = f" (deadline of {self._timeout_s:g} s)" if not self.left_s else ""
            raise TransportError(f"{what} failed{late}: {error}") from None
