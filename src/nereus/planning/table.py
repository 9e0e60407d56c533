"""What the search knows of one model-stage's candidates: columns of seconds, slots and bytes, and their best values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nereus.cost.rows import Bools, Floats, Ints


@dataclass(frozen=True)
class Table:
    """Rows that fit alone. `calls` are seconds by call and row, `sync` what is added to every path.

    `name` is equal for rows that count as one layout; `row` is where a row lies in its grid.
    """

    calls: tuple[Floats, ...]
    sync: Floats
    slots: Ints
    resident: Floats
    transient: Floats
    name: Ints
    row: Ints
    _weights: dict[int, Floats] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, rows: Ints | Bools) -> Table:
        """Some of the rows."""
        return Table(
            tuple(call[rows] for call in self.calls), self.sync[rows], self.slots[rows], self.resident[rows],
            self.transient[rows], self.name[rows], self.row[rows],
        )  # fmt: skip

    def weight(self, calls: int) -> Floats:
        """Seconds of the calls whose bits are set, the synchronisation included."""
        if calls not in self._weights:
            total = self.sync
            for index, seconds in enumerate(self.calls):
                if calls >> index & 1:
                    total = total + seconds
            self._weights[calls] = total
        return self._weights[calls]

    def sizes(self) -> list[Floats | Ints]:
        """Columns of which less is never worse."""
        return [*(call for call in self.calls), self.sync, self.slots, self.resident, self.transient]

    def undominated(self) -> Table:
        """Without rows that another of the same name matches in everything."""
        order = np.argsort(self.name, kind="stable")
        different = [column for column in self.sizes() if column.min() < column.max()]
        name, sizes = self.name[order], np.array(different or [self.sync])[:, order]
        stays, shift = np.ones(len(order), dtype=np.bool_), 1
        while (alike := name[shift:] == name[:-shift]).any():
            earlier, later = sizes[:, :-shift], sizes[:, shift:]
            first = alike & (earlier <= later).all(axis=0)
            stays[shift:] &= ~first
            stays[:-shift] &= first | ~(alike & (earlier >= later).all(axis=0))
            shift += 1
            if np.count_nonzero(stays) < FEWER * len(order):
                order, name, sizes, shift = order[stays], name[stays], sizes[:, stays], 1
                stays = np.ones(len(order), dtype=np.bool_)
        return self[np.sort(order[stays])]


class Ideal:
    """The fastest that some rows can be within a limit on slots or on bytes; every answer is a lower bound."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.slots = int(table.slots.min())
        self.resident = float(table.resident.min())
        self._best: dict[int, float] = {}
        self._stairs: dict[tuple[str, int], Floats] = {}
        self._orders: dict[str, tuple[Ints, Floats]] = {}

    def best(self, calls: int) -> float:
        """Without a limit."""
        if calls not in self._best:
            self._best[calls] = float(self.table.weight(calls).min())
        return self._best[calls]

    def left(self, limited: str, limit: Floats) -> Ints:
        """How many rows have at most `limit` slots, resident bytes, or bytes in all."""
        return self._order(limited)[1].searchsorted(limit, side="right")

    def within(self, limited: str, calls: int, left: Ints) -> Floats:
        """Of so many rows with fewest slots or bytes; infinite where none is left."""
        key = (limited, calls)
        if key not in self._stairs:
            least = np.minimum.accumulate(self.table.weight(calls)[self._order(limited)[0]])
            self._stairs[key] = np.concatenate(([np.inf], least))
        return self._stairs[key][left]

    def _order(self, limited: str) -> tuple[Ints, Floats]:
        if limited not in self._orders:
            table = self.table
            column = {"slots": table.slots, "resident": table.resident, "bytes": table.resident + table.transient}
            order = np.argsort(column[limited], kind="stable")
            self._orders[limited] = (order, column[limited][order].astype(np.float64))
        return self._orders[limited]


def beaten(sizes: Sequence[Floats], name: Ints, k: int) -> Bools:
    """Rows that one of their own name, or `k` of other names, match in every column; of equal rows the first stays.

    For each name only its first row in order counts against others.
    """
    matrix = np.array(sizes, dtype=np.float64)
    order = np.lexsort(matrix[::-1])
    matrix, name = matrix[:, order], np.unique(name[order], return_inverse=True)[1]
    kept, seen = np.zeros(0, dtype=np.int64), np.zeros(len(order), dtype=np.bool_)
    speaks = np.zeros(len(order), dtype=np.bool_)
    result = np.zeros(len(order), dtype=np.bool_)
    for start in range(0, len(order), BLOCK):
        block = np.arange(start, min(start + BLOCK, len(order)))
        new, first = np.unique(name[block], return_index=True)
        speaks[block[first[~seen[new]]]] = True
        seen[new] = True
        rivals = np.concatenate([kept, block])
        match = rivals[None, :] < block[:, None]
        for column in matrix:
            match &= column[rivals][None, :] <= column[block][:, None]
        own = (match & (name[rivals][None, :] == name[block][:, None])).any(axis=1)
        lost = own | (np.count_nonzero(match[:, speaks[rivals]], axis=1) >= k)
        result[order[block[lost]]] = True
        kept = np.concatenate([kept, block[~lost]])
    return result


BLOCK = 256
FEWER = 0.7
"""When so many rows are left they are worth comparing afresh, with nearer neighbours."""
