"""The fastest choices over all arrangements: a quick look at a few, then all of them in the order of a bound.

The bound of an arrangement needs no memory: the fastest times within the best cut of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nereus.core import ModelStage, Workflow
from nereus.cost.rows import Floats, Ints
from nereus.planning.choices import REPLICAS, Arrangement
from nereus.planning.exact import Best, Solver
from nereus.planning.program import Program, programs
from nereus.planning.space import apart
from nereus.planning.table import Table

WIDTH = 24
"""Rows and partial choices that a quick look at a colocated shape keeps."""
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
    for quick in (True, False):
        for bound_s, index in ranked:
            each = arrangements[index]
            if bound_s < best.cutoff_s and (each.program.colocated or not quick):
                cutoff_s, tables = known.get(each.key, (float("inf"), each.tables))
                if best.cutoff_s < cutoff_s:
                    tables = _near(free, tables, each, best)
                    known[each.key] = best.cutoff_s, tables
                if all(map(len, tables)):
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


class _Bounds:
    """Bounds of shapes: the fastest times within the best cut between one part of the pool and the rest."""

    def __init__(self, tables: Sequence[Table], slots: int) -> None:
        self.slots = slots
        self.tables = tables
        self.needs = [set(table.slots.tolist()) for table in tables]
        self._cuts: dict[tuple[int, ...], Ints] = {(): np.array([slots])}
        self._best: dict[tuple[int, int], Floats] = {}
        self._paths: dict[object, Floats | float] = {}

    def of(self, program: Program) -> float:
        """No choice of this shape is faster."""
        first, second = program.sides
        if first not in self._cuts:
            self._cuts[first] = np.array(sorted({need for level in first for need in self.needs[level]}))
        cut = self._cuts[first]
        left = dict.fromkeys(first, cut) | dict.fromkeys(second, self.slots - cut)
        longest: Floats = np.zeros(len(cut))
        for terms in program.paths:
            key = (first, second, terms)
            if key not in self._paths:
                every = ((self._within(level, calls), left.get(level)) for level, calls in enumerate(terms))
                self._paths[key] = sum(float(each[-1]) if cuts is None else each[cuts] for each, cuts in every)
            longest = np.maximum(longest, self._paths[key])
        return float(longest.min())

    def _within(self, level: int, calls: int) -> Floats:
        """The fastest with at most so many slots, by slots."""
        if (level, calls) not in self._best:
            table = self.tables[level]
            fastest = np.full(self.slots + 1, np.inf)
            np.minimum.at(fastest, table.slots, table.weight(calls))
            self._best[level, calls] = np.minimum.accumulate(fastest)
        return self._best[level, calls]
