"""How units lie in nodes: TP groups stay inside one, replicas are packed, and so it is known who leaves a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus.cost.rows import Bools, Ints

NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class Runs:
    """Units of `pp` blocks each, packed one after another: what holds for the first `dp` of them.

    `pp_from` and `dp_from` are the smallest dp at which a pipeline, and the replicas of a position, leave a node.
    """

    most: int
    pp_from: int
    dp_from: int

    @property
    def columns(self) -> tuple[int, int, int]:
        """In the order of the fields."""
        return self.most, self.pp_from, self.dp_from


class Packing:
    """Blocks of tp × cp devices dealt to nodes of `sizes` free devices in turn; a node keeps what a block leaves over.

    A cp degree too large for a node is dealt in TP groups, so only those stay inside.
    """

    def __init__(self, sizes: Sequence[int], tp: int, cp: int = 1) -> None:
        groups = np.array(sizes, dtype=np.int64) // tp
        self.whole = cp <= int(groups.max(initial=0))
        self.width = 1 if self.whole else cp
        """Dealt pieces that make one block."""
        per_node = groups // cp if self.whole else groups
        self.devices = tp * cp // self.width
        """Of one dealt piece."""
        self.node = np.repeat(np.arange(len(per_node)), per_node)
        """Of each dealt piece."""
        self._before = np.cumsum(per_node) - per_node
        self._least = np.minimum.accumulate(np.where(per_node > 0, per_node, NEVER))
        self._runs: dict[int, Runs] = {}

    @property
    def blocks(self) -> int:
        """How many there is room for."""
        return len(self.node) // self.width

    def runs(self, pp: int) -> Runs:
        """What holds for units of `pp` blocks."""
        if pp not in self._runs:
            self._runs[pp] = self._packed(pp)
        return self._runs[pp]

    def _packed(self, pp: int) -> Runs:
        width = pp * self.width
        most = len(self.node) // width
        if not most:
            return Runs(0, NEVER, NEVER)
        units = self.node[: most * width].reshape(most, width)
        apart = units[:, 0] != units[:, -1] if self.whole or pp > 1 else np.zeros(most, dtype=np.bool_)
        moved = units.sum(axis=1) > units[0].sum()
        return Runs(most, _first(apart), _first(moved))

    def nodes(self, blocks: Ints) -> Ints:
        """Nodes from the front that so many blocks reach into."""
        return np.asarray(self.node[blocks * self.width - 1] + 1)

    def fewest(self, blocks: Ints) -> Ints:
        """Devices on the node that holds fewest of so many blocks."""
        pieces = blocks * self.width
        last = self.node[pieces - 1]
        earlier = np.where(last > 0, self._least[np.maximum(last - 1, 0)], NEVER)
        return np.asarray(np.minimum(pieces - self._before[last], earlier) * self.devices)


def _first(holds: Bools) -> int:
    return int(holds.argmax()) + 1 if holds.any() else NEVER
