"""The fastest choices of one row for every model-stage under one shape: level by level, nothing lost.

With some levels chosen, every sum of `program.py` has a partial value. What is left of slots and bytes bounds the time
of every level still to come from below, so a partial choice whose bound reaches the cutoff is dropped; so is one that
`k` others of different layouts match in all sums, since each completion of it is matched by theirs. Where many
are left, the few with the lowest bounds are completed first: partitions that run side by side have very many partial
choices none of which is worse than another, and the first complete ones rule out nearly all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nereus.cost.rows import Bools, Floats, Ints
from nereus.planning.program import Column, Layer, Program
from nereus.planning.table import Ideal, Table, beaten

CROWD = 192
"""More rows or partial choices than that are compared with each other, and looked at in the order of their bounds."""
SHORT = 96
"""Tables of so many rows are joined as they are: they need no quick look, and no bound of each row in its limits."""
WIDE = 8
"""A quick look bounds so many times its width of each level's rows, those that are fastest without limits."""
FEW = 16
"""So many of a crowd are completed before the others."""
CELLS = 1 << 18
"""Pairs that are looked at in one go."""
SLACK = 1 + 1e-12
"""Room for rounding in comparisons of bytes."""


@dataclass(frozen=True, slots=True)
class Found:
    """A choice: seconds, which arrangement it is of, and by level the row in its grid."""

    step_s: float
    arrangement: int
    rows: tuple[int, ...]


@dataclass
class Best:
    """The `k` fastest choices of different layouts so far."""

    k: int
    found: dict[tuple[int, ...], Found] = field(default_factory=dict)

    @property
    def cutoff_s(self) -> float:
        """A choice must be faster than this to count."""
        return max(f.step_s for f in self.found.values()) if len(self.found) >= self.k else float("inf")

    def offer(self, name: tuple[int, ...], found: Found) -> None:
        """Take a choice if it is the fastest of its layout and among the `k` fastest."""
        if name in self.found and self.found[name].step_s <= found.step_s:
            return
        self.found[name] = found
        if len(self.found) > self.k:
            del self.found[max(self.found, key=lambda key: self.found[key].step_s)]


@dataclass(frozen=True, slots=True)
class State:
    """Partial choices as columns: sums by family, the largest transient by partition, rows by level, and a name."""

    paths: list[Floats]
    devices: list[Floats]
    stored: list[list[Floats]]
    added: list[Floats]
    rows: list[Ints]
    name: Ints

    def take(self, which: Ints | Bools | slice) -> State:
        """Some of them."""
        return State(
            [column[which] for column in self.paths],
            [column[which] for column in self.devices],
            [[column[which] for column in columns] for columns in self.stored],
            [column[which] for column in self.added],
            [column[which] for column in self.rows],
            self.name[which],
        )

    def sizes(self, layer: Layer) -> list[Floats]:
        """Columns of which less is never worse, as far as they still matter."""
        devices = [
            sums for column, sums in zip(layer.devices, self.devices, strict=True) if any(map(any, column.rests))
        ]
        stored = [
            sums for columns, unfinished in zip(self.stored, layer.open, strict=True) if unfinished for sums in columns
        ]
        return [
            *self.paths,
            *devices,
            *stored,
            *(sums for sums, more in zip(self.added, layer.open, strict=True) if more),
        ]


class Solver:
    """Solves one shape. `slots` is the length of the pool, `room` the usable bytes of a device by partition.

    `number` goes with what is found.
    """

    def __init__(
        self, program: Program, tables: Sequence[Table], slots: int, room: Sequence[float], best: Best, number: int = 0
    ) -> None:
        self.number = number
        self.program = program
        self.slots = slots
        self.room = [each * SLACK for each in room]
        self.best = best
        self.tables = list(tables)
        self.ideals = [Ideal(table) for table in tables]

    def run(self, width: int | None = None) -> None:
        """Offer every choice that may count; with a `width` only look at so many at a time."""
        kept, ideals = list(self.tables), list(self.ideals)
        if self._narrow(width):
            layer = self.program.layers[0]
            state = self._alone(self.tables[0], 0, layer)
            self._complete(state, self._bounds(state, layer), 1, width)
        self.tables, self.ideals = kept, ideals

    def _complete(self, state: State, bounds: Floats, level: int, width: int | None) -> None:
        """Offer the completions of partial choices: first of a few with the lowest bounds, then of more and more.

        What the first ones lead to lowers the cutoff, so that far fewer of the others are left.
        """
        if level == len(self.program.levels):
            self._offer(state)
            return
        most = size = max(1, CELLS // len(self.tables[level]))
        if len(bounds) > CROWD:
            order, size = np.argsort(bounds, kind="stable"), FEW
            state, bounds = state.take(order), bounds[order]
        start = 0
        while start < len(bounds) and bounds[start:].min() < self.best.cutoff_s:
            some = state.take(slice(start, start + size))
            if start and len(some.name) > CROWD:
                some = some.take(~beaten(some.sizes(self.program.layers[level - 1]), some.name, self.best.k))
            self._complete(*self._grow(some, level, width), level + 1, width)
            start, size = start + size, min(2 * size, most)

    def near(self) -> tuple[Bools, ...]:
        """By level the rows whose bound, from the fastest times of the others, is below the cutoff."""
        return tuple(self._coarse(level) < self.best.cutoff_s for level in range(len(self.tables)))

    def _narrow(self, width: int | None) -> bool:
        """Drop rows that cannot be part of a choice that counts; False when a level has none left."""
        for level in range(len(self.tables)):
            table, layer = self.tables[level], self.program.alone[level]
            bounds = self._coarse(level)
            near = bounds < self.best.cutoff_s
            if width is not None and np.count_nonzero(near) > WIDE * width:
                near &= bounds <= np.partition(bounds, WIDE * width - 1)[WIDE * width - 1]
            if not near.all():
                table = table[near]
            if len(table) > SHORT:
                state = self._alone(table, level, layer)
                bounds = self._bounds(state, layer)
                keep = bounds < self.best.cutoff_s
                if width is not None and keep.sum() > width:
                    keep &= bounds <= np.partition(bounds, width - 1)[width - 1]
                elif keep.sum() > CROWD:
                    keep[keep] = ~beaten(state.take(keep).sizes(layer), table.name[keep], self.best.k)
                table = table[keep]
            if not len(table):
                return False
            self.tables[level], self.ideals[level] = table, Ideal(table)
        return True

    def _coarse(self, level: int) -> Floats:
        """A bound of every row of a level from the fastest times of the others."""
        table, result = self.tables[level], np.zeros(len(self.tables[level]))
        for column in self.program.alone[level].paths:
            rest = max(
                sum(ideal.best(rest[other]) for other, ideal in enumerate(self.ideals) if other != level)
                for rest in column.rests
            )
            for _, calls in column.sources:
                result = np.maximum(result, table.weight(calls) + rest)
        return result

    def _alone(self, table: Table, level: int, layer: Layer) -> State:
        """Every row of one level as a partial choice."""
        zero, home = np.zeros(len(table)), self.program.home[level]

        def summed(columns: Sequence[Column], value: Floats | Ints) -> list[Floats]:
            whole = np.asarray(value, dtype=np.float64)
            return [whole if column.sources[-1][1] else zero for column in columns]

        return State(
            [np.maximum.reduce([table.weight(calls) for _, calls in column.sources]) for column in layer.paths],
            summed(layer.devices, table.slots),
            [summed(columns, table.resident) for columns in layer.stored],
            [table.transient if index == home else zero for index in range(len(self.room))],
            [table.row],
            table.name,
        )

    def _grow(self, state: State, level: int, width: int | None) -> tuple[State, Floats]:
        """Every partial choice with every row of the next level, as far as it may count, and its bound."""
        layer = self.program.layers[level]
        grown = self._pairs(state, layer, self.tables[level])
        bound = self._bounds(grown, layer)
        keep: Ints | Bools = bound < self.best.cutoff_s
        if width is not None and np.count_nonzero(keep) > width:
            keep = np.argpartition(bound, width)[:width]
        grown, bound = grown.take(keep), bound[keep]
        return grown, bound

    def _pairs(self, state: State, layer: Layer, table: Table) -> State:
        new, home = layer.chosen[-1], self.program.home[layer.chosen[-1]]
        size = (len(state.name), len(table))
        ok = np.ones(size, dtype=np.bool_)
        slots = [_outer(column, state.devices, table.slots, size) for column in layer.devices]
        for column, used in zip(layer.devices, slots, strict=True):
            ok &= used + self._rest(column, [ideal.slots for ideal in self.ideals], layer) <= self.slots
        added = np.maximum(state.added[home][:, None], table.transient[None, :])
        stored = [
            [_outer(column, state.stored[index], table.resident, size) for column in columns]
            for index, columns in enumerate(layer.stored)
        ]
        for column, used in zip(layer.stored[home], stored[home], strict=True):
            rest = self._rest(column, [ideal.resident for ideal in self.ideals], layer)
            ok &= used + added + rest <= self.room[home]
        paths, cutoff_s = [], self.best.cutoff_s
        for column in layer.paths:
            terms: list[Floats] = [
                state.paths[of][:, None] + table.weight(calls)[None, :] for of, calls in column.sources
            ]
            longest = terms[0] if len(terms) == 1 else np.maximum.reduce(terms)
            rest = max(sum(self.ideals[j].best(rest[j]) for j in layer.rest) for rest in column.rests)
            ok &= longest + rest < cutoff_s
            paths.append(longest)
        one, other = np.nonzero(ok)
        return State(
            [column[one, other] for column in paths],
            [column[one, other] for column in slots],
            [[column[one, other] for column in columns] for columns in stored],
            [added[one, other] if index == home else column[one] for index, column in enumerate(state.added)],
            [*(rows[one] for rows in state.rows), table.row[other]],
            (state.name[one] * MIX) ^ (table.name[other] * (2 * new + 3)),
        )

    def _rest(self, column: Column, least: Sequence[float], layer: Layer) -> float:
        return max(sum(least[j] for j in layer.rest if rest[j]) for rest in column.rests)

    def _bounds(self, state: State, layer: Layer) -> Floats:
        """No completion of a partial choice is faster; infinite where there is none."""
        left = {level: self._left(state, layer, level) for level in layer.rest}
        known: dict[tuple[int, int], Floats | float] = {}
        result = np.zeros(len(state.name))
        for column, sums in zip(layer.paths, state.paths, strict=True):
            for rest in column.rests:
                total: Floats = sums
                for level in layer.rest:
                    key = (level, rest[level])
                    if key not in known:
                        known[key] = self._least(level, rest[level], left[level])
                    total = total + known[key]
                result = np.maximum(result, total)
        return result

    def _left(self, state: State, layer: Layer, level: int) -> Mapping[str, Ints]:
        """Rows left to a level: by slots where others run beside it, by bytes beside what is stored and added."""
        limits: dict[str, Floats] = {}
        slots = [ideal.slots for ideal in self.ideals]
        used = _most(layer.devices, state.devices, slots, layer, level, constants=False)
        if used is not None:
            limits["slots"] = self.slots - used
        home = self.program.home[level]
        resident = [ideal.resident for ideal in self.ideals]
        stored = _most(layer.stored[home], state.stored[home], resident, layer, level, constants=True)
        if stored is not None:
            limits["bytes"] = self.room[home] - stored
            limits["resident"] = limits["bytes"] - state.added[home]
        return {name: self.ideals[level].left(name, limit) for name, limit in limits.items()}

    def _least(self, level: int, calls: int, left: Mapping[str, Ints]) -> Floats | float:
        """The fastest that a level can still be, by each of its limits."""
        ideal = self.ideals[level]
        found: Floats | None = None
        for name, rows in left.items():
            least = ideal.within(name, calls, rows)
            found = least if found is None else np.maximum(found, least)
        return ideal.best(calls) if found is None else found

    def _offer(self, state: State) -> None:
        """Complete choices, the fastest first."""
        (step_s,) = state.paths
        for index in np.argsort(step_s, kind="stable"):
            if step_s[index] >= self.best.cutoff_s:
                return
            rows = tuple(int(column[index]) for column in state.rows)
            names = self._names(rows)
            self.best.offer(names, Found(float(step_s[index]), self.number, rows))

    def _names(self, rows: Sequence[int]) -> tuple[int, ...]:
        """The layouts of a choice, model-stages in a fixed order."""
        named = {}
        for model_stage, table, row in zip(self.program.levels, self.tables, rows, strict=True):
            named[model_stage.sort_key] = int(table.name[np.flatnonzero(table.row == row)[0]])
        return tuple(named[key] for key in sorted(named))


MIX = 6364136223846793005


def _outer(column: Column, before: Sequence[Floats], value: Floats | Ints, size: tuple[int, int]) -> Floats:
    """A column of every pair: the largest of its sources."""
    terms = [
        before[of][:, None] + value[None, :] if taken else np.broadcast_to(before[of][:, None], size)
        for of, taken in column.sources
    ]
    return terms[0] if len(terms) == 1 else np.maximum.reduce(terms)


def _most(
    columns: Sequence[Column], sums: Sequence[Floats], least: Sequence[float], layer: Layer, level: int, constants: bool
) -> Floats | None:
    """The largest sum that a level would add to, the least of the other levels to come included."""
    found: Floats | None = None
    for column, partial in zip(columns, sums, strict=True):
        rests = [rest for rest in column.rests if rest[level]]
        if not rests:
            continue
        others = max(sum(least[j] for j in layer.rest if rest[j] and j != level) for rest in rests)
        if not constants and not others and not any(taken for _, taken in column.sources) and not partial.any():
            continue
        total = partial + others
        found = total if found is None else np.maximum(found, total)
    return found
