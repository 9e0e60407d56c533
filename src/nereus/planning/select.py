"""Prices every candidate of a problem and finds the fastest choices of all shapes.

Shapes are solved in the order of a bound that needs no memory: the fastest times within the best cut of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nereus.core import Candidate, ModelStage
from nereus.cost.rows import Floats, Ints
from nereus.cost.step import StepModel
from nereus.planning.exact import Best, Found, Solver
from nereus.planning.grid import Grid, Grids
from nereus.planning.problem import Problem
from nereus.planning.program import Program, compiled
from nereus.planning.refusals import Refusals
from nereus.planning.space import shapes
from nereus.planning.table import Table

WIDTH = 48
"""Rows and partial choices that the first, quick look at a shape keeps."""
QUICK = 3
"""Shapes that get a quick look before any is solved."""


@dataclass(frozen=True, slots=True)
class Priced:
    """The candidates of one model-stage and the table of those that fit."""

    grid: Grid
    table: Table


class Selection:
    """All choices on one regular pool of `slots` equal slots."""

    def __init__(self, problem: Problem, model: StepModel, sizes: Sequence[int], kind: str, refusals: Refusals) -> None:
        self.problem = problem
        self.model = model
        self.kind = kind
        self.grids = Grids(problem, tuple(sizes), refusals)
        self.slots = len(sizes) if len(sizes) > 1 else sizes[0]
        self.room = float(problem.usable(kind))
        self.priced = {ms: self._priced(ms) for ms in problem.workflow.model_stages}

    def _priced(self, model_stage: ModelStage) -> Priced:
        return priced(self.problem, self.model, self.grids.of(model_stage), frozenset({self.kind}), self.room, self.grids.refusals)

    @property
    def considered(self) -> int:
        """Candidates priced."""
        return sum(len(each.grid.rows) for each in self.priced.values())

    def best(self, k: int) -> Best:
        """The `k` fastest choices of different layouts."""
        best = Best(k)
        tables = {ms: each.table for ms, each in self.priced.items()}
        if not all(map(len, tables.values())):
            return best
        programs = [compiled(shape, self.problem.workflow) for shape in shapes(self.problem.workflow.model_stages)]
        bounds = _Bounds(tables, self.slots)
        ranked = sorted(((bounds.of(program), index) for index, program in enumerate(programs)))
        solvers = {}
        for bound_s, index in ranked:
            program = programs[index]
            if bound_s < best.cutoff_s:
                levels = [tables[ms] for ms in program.levels]
                room = [self.room] * len(program.shape.partitions)
                solvers[index] = Solver(program, levels, self.slots, room, best)
                if len(solvers) <= QUICK:
                    solvers[index].run(WIDTH)
        for bound_s, index in ranked:
            if bound_s < best.cutoff_s:
                solvers[index].run()
        return best

    def candidates(self, found: Found) -> Iterator[tuple[ModelStage, Candidate, int]]:
        """The rows of a choice in full, with the slots that each needs."""
        for model_stage, row in zip(found.program.levels, found.rows, strict=True):
            grid = self.priced[model_stage].grid
            yield model_stage, grid.candidate(row), int(grid.slots[row])


def priced(
    problem: Problem, model: StepModel, grid: Grid, kinds: frozenset[str], room: float, refusals: Refusals
) -> Priced:
    """What every row costs; those that do not fit a device alone are counted as refused."""
    rows, calls = grid.rows, problem.workflow.calls_of(grid.model_stage)
    prices = model.price(grid.model_stage, rows, kinds)
    fits = np.flatnonzero(prices.resident_bytes + prices.transient_bytes <= room)
    if len(fits) < len(rows):
        beyond = np.setdiff1d(np.arange(len(rows)), fits)
        refusals.add("does not fit in memory, even alone", list(beyond), grid.label)
    name = ((rows.tp * 1024 + rows.pp) * 1024 + rows.cp) * (1 << 20) + rows.dp
    table = Table(
        tuple(prices.call_s[call.name] for call in calls), prices.sync_s, grid.slots,
        prices.resident_bytes, prices.transient_bytes, name, np.arange(len(rows)),
    )[fits]  # fmt: skip
    return Priced(grid, table.undominated() if len(table) else table)


class _Bounds:
    """A bound of each shape: the fastest times within the best cut between one part of the pool and the rest."""

    def __init__(self, tables: dict[ModelStage, Table], slots: int) -> None:
        self.slots = slots
        self.tables = tables
        self.needs = {ms: np.unique(table.slots) for ms, table in tables.items()}
        self._best: dict[tuple[ModelStage, int], Floats] = {}

    def of(self, program: Program) -> float:
        """No choice of this shape is faster."""
        first, second = _sides(program)
        if not first:
            cut = np.array([self.slots])
        else:
            cut = np.unique(np.concatenate([self.needs[program.levels[level]] for level in first]))
        left = {level: cut for level in first} | {level: self.slots - cut for level in second}
        whole = np.array([self.slots])
        longest: Floats = np.zeros(len(cut))
        for terms in program.paths:
            total: Floats = np.zeros(len(cut))
            for level, calls in enumerate(terms):
                total = total + self._within(program.levels[level], calls)[left.get(level, whole)]
            longest = np.maximum(longest, total)
        return float(longest.min())

    def _within(self, model_stage: ModelStage, calls: int) -> Floats:
        """The fastest with at most so many slots, by slots."""
        key = (model_stage, calls)
        if key not in self._best:
            table = self.tables[model_stage]
            fastest = np.full(self.slots + 1, np.inf)
            np.minimum.at(fastest, table.slots, table.weight(calls))
            self._best[key] = np.minimum.accumulate(fastest)
        return self._best[key]


def _sides(program: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Levels of a first part of the pool, and those that never have devices of it; both empty without such a cut."""
    shape, levels = program.shape, program.levels
    if len(shape.partitions) > 1:
        inside = {ms for group in shape.partitions[0] for ms in group}
        return (
            tuple(i for i, ms in enumerate(levels) if ms in inside),
            tuple(i for i, ms in enumerate(levels) if ms not in inside),
        )
    groups: dict[object, list[tuple[ModelStage, ...]]] = {}
    for group in shape.partitions[0]:
        groups.setdefault(group[0].stage, []).append(group)
    for ms in levels:
        beside = groups[ms.stage]
        if len(beside) > 1:
            first = next(group for group in beside if ms in group)
            return (
                tuple(i for i, one in enumerate(levels) if one in first),
                tuple(i for i, one in enumerate(levels) if any(one in group for group in beside if group != first)),
            )
    return (), ()
