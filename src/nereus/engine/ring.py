"""Parts of one buffer, given out and taken back in order: what does not travel from and into tensors themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from nereus.transition.buckets import ALIGNMENT


def padded(size: int) -> int:
    """Room for a message of `size` bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Ring:
    """Room for at least the largest of `sizes`, for all of them where that is at most `most_bytes`.

    `pinned` host memory is what a GPU copies to and from at full speed.
    """

    def __init__(self, sizes: Sequence[int], most_bytes: int, device: torch.device, pinned: bool = False) -> None:
        room = max(max(sizes, default=0), min(sum(sizes), most_bytes))
        self.buffer = torch.empty(room, dtype=torch.uint8, device=device, pin_memory=pinned)
        self._taken: deque[tuple[int, int]] = deque()

    @property
    def bytes(self) -> int:
        """Size of the buffer."""
        return int(self.buffer.numel())

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes can be taken before anything is given back."""
        return not size or self._place(size) is not None

    def take(self, size: int) -> torch.Tensor:
        """The next part; there must be room."""
        start = self._place(size) if size else 0
        if start is None:
            raise ValueError(f"no room for {size} bytes")
        if size:
            self._taken.append((start, start + size))
        return self.buffer[start : start + size]

    def give_back(self, size: int) -> None:
        """The oldest part, which had `size` bytes."""
        if size:
            self._taken.popleft()

    def _place(self, size: int) -> int | None:
        if not self._taken:
            return 0
        first, last = self._taken[0][0], self._taken[-1][1]
        if last <= first:  # the newest part lies before the oldest
            return last if last + size <= first else None
        if last + size <= self.bytes:
            return last
        return 0 if size <= first else None
