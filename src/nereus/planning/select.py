"""The fastest choices over all arrangements: a quick look at a few, then all of them in the order of a bound.

The bound of an arrangement needs no memory: the fastest times within the best cut of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from nereus.core import ModelStage, Workflow
from nereus.cost.rows import Floats, Ints
from nereus.planning.choices import REPLICAS, Arrangement
from nereus.planning.exact import SHORT, Best, Solver
from nereus.planning.program import Program, programs
from nereus.planning.space import apart
from nereus.planning.table import Table

WIDTH = 24
"""Rows and partial choices that a quick look keeps; it is at colocated shapes and at the one of the lowest bound."""
MANY = 400
"""Of more rows than that a quick look takes those with a power of two of replicas."""


def fastest(arrangements: Sequence[Arrangement], workflow: Workflow, k: int) -> Best:
    """The `k` fastest choices of different layouts."""
    best = Best(k)
    (free,) = programs(workflow, (apart(workflow.model_stages),))
    bounds: dict[object, _Bounds] = {}
    ranked: list[tuple[float, int]] = []
    for index, each in enumerate(arrangements):
        if all(map(len, each.tables)):
            if each.key not in bounds:
                bounds[each.key] = _Bounds(each.tables, each.slots)
            ranked.append((bounds[each.key].of(each.program), index))
    ranked.sort()

    known: dict[object, tuple[float, Sequence[Table]]] = {}
    likely = [one for one in ranked if one is ranked[0] or arrangements[one[1]].program.colocated]
    for quick, some in ((True, likely), (False, ranked)):
        for bound_s, index in some:
            each = arrangements[index]
            if bound_s < best.cutoff_s:
                cutoff_s, tables = known.get(each.key, (float("inf"), each.tables))
                if best.cutoff_s < cutoff_s:
                    tables = _near(free, tables, each, best)
                    known[each.key] = best.cutoff_s, tables
                if all(map(len, tables)) and (not quick or any(len(table) > SHORT for table in tables)):
                    tables = [_few(table) for table in tables] if quick else tables
                    Solver(each.program, tables, each.slots, each.room, best, index).run(WIDTH if quick else None)
    return best


def _near(free: Program, tables: Sequence[Table], each: Arrangement, best: Best) -> list[Table]:
    """Rows that may still count, by what they take with the fastest of the others beside them."""
    rows = Solver(free, tables, each.slots, each.room[:1] * len(free.levels), best).near()
    return [table if near.all() else table[near] for table, near in zip(tables, rows, strict=True)]


def choose(workflow: Workflow, tables: Mapping[ModelStage, Table], slots: int, room: float, k: int) -> Best:
    """The `k` fastest choices of different layouts on a pool of `slots` equal slots with `room` bytes a device."""
    arrangements = [
        Arrangement(program, tuple(tables[ms] for ms in program.levels), slots, (room,) * len(program.stored), {}, None)
        for program in programs(workflow)
    ]
    return fastest(arrangements, workflow, k)


def _few(table: Table) -> Table:
    """Enough rows for a quick look."""
    if len(table) <= MANY:
        return table
    replicas = table.name % REPLICAS
    return table[(replicas & (replicas - 1)) == 0]


@cache
def _paths(program: Program) -> Ints:
    return np.array(program.paths, dtype=np.int64)


class _Bounds:
    """Bounds of shapes: the fastest times within the best cut between one part of the pool and the rest."""

    def __init__(self, tables: Sequence[Table], slots: int) -> None:
        self.slots = slots
        self.needs = [set(table.slots.tolist()) for table in tables]
        self._first = np.cumsum([0] + [1 << len(table.calls) for table in tables])
        """Where the sets of calls of each level begin among `_fastest`."""
        self._level = np.repeat(np.arange(len(tables)), np.diff(self._first))
        every = [(table, calls) for table in tables for calls in range(1 << len(table.calls))]
        self._fastest = np.array([self._within(*each) for each in every])
        self._cut: dict[object, Floats] = {}

    def of(self, program: Program) -> float:
        """No choice of this shape is faster."""
        if program.sides not in self._cut:
            self._cut[program.sides] = self._by_cut(*program.sides)
        terms = _paths(program) + self._first[:-1]
        return float(self._cut[program.sides][terms].sum(axis=1).max(axis=0).min())

    def _by_cut(self, first: tuple[int, ...], second: tuple[int, ...]) -> Floats:
        """The fastest times by set of calls and cut: what `first` may need, the rest for `second`."""
        cuts = sorted({need for level in first for need in self.needs[level]}) or [self.slots]
        left = np.full((len(self.needs), len(cuts)), self.slots)
        left[list(first)] = cuts
        left[list(second)] = self.slots - left[list(first[:1])]
        return np.take_along_axis(self._fastest, left[self._level], axis=1)

    def _within(self, table: Table, calls: int) -> Floats:
        """The fastest with at most so many slots, by slots."""
        fastest = np.full(self.slots + 1, np.inf)
        np.minimum.at(fastest, table.slots, table.weight(calls))
        return np.minimum.accumulate(fastest)
