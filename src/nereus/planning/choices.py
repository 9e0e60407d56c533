"""Prices the candidates of a problem and lists the arrangements in which the search looks for plans.

- On a pool of equal nodes: every shape of `space.py`. Those with more groups side by side than there are nodes lie
  inside the first node. On up to `EXACT_POOL` devices one of two partitions may also lie inside the last node, its
  groups side by side there, and the other on whole nodes.
- With nodes of several kinds or sizes: every shape on each of the two largest sets of equal nodes alone; every shape of
  two partitions with one on each set; and all nodes together, taking turns, at the pace of the slowest kind in use.
- Model-stages with pinned devices have these to themselves; what shares a stage with them takes turns with them on the
  whole pool, or uses the rest of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import gcd, lcm
from typing import Literal

import numpy as np

from nereus.core import Candidate, ModelStage, Plan
from nereus.cost.rows import Bools, Rows
from nereus.cost.step import StepModel
from nereus.planning.exact import Found
from nereus.planning.grid import EXACT_POOL, Grid, Grids
from nereus.planning.place import shared_out
from nereus.planning.pool import Site, whole
from nereus.planning.problem import Problem
from nereus.planning.program import Program, programs
from nereus.planning.refusals import Refusals
from nereus.planning.space import Shape, shapes, sharing
from nereus.planning.table import Table

ENDLESS = 1 << 20
"""No device is looked for that has more times the memory of those there are."""


@dataclass(frozen=True)
class Arrangement:
    """A program with the tables, the slots and the usable bytes to solve it with. `sites` are by model-stage."""

    program: Program
    tables: tuple[Table, ...]
    slots: int
    room: tuple[float, ...]
    sites: Mapping[ModelStage, Site]
    key: object
    """Arrangements with equal keys have the same tables."""


@dataclass
class Choices:
    """Candidates, priced once for each site that they may be on."""

    problem: Problem
    model: StepModel
    refusals: Refusals = field(default_factory=Refusals)
    considered: int = 0
    _grids: dict[Site, Grids] = field(default_factory=dict)
    _grid: dict[tuple[ModelStage, Site], Grid] = field(default_factory=dict)
    _tables: dict[tuple[ModelStage, Site], Table] = field(default_factory=dict)
    _fitting: dict[tuple[ModelStage, Site, float], Table] = field(default_factory=dict)
    _sites: tuple[Site, ...] = ()
    _only: dict[frozenset[int], Site] = field(default_factory=dict)
    _slices: dict[tuple[Site, int, int], Site] = field(default_factory=dict)
    _whole: dict[Site, Site] = field(default_factory=dict)
    """What a slice was cut from."""
    times: float = 1.0
    """Of their memory that devices are taken to have."""
    rank: Literal["fullest", "first", "emptiest"] = "fullest"
    """The pp rank of a candidate whose bytes count; with another than the fullest, what is found may not fit."""
    base: Choices | None = None
    """Where the seconds are from that another rank's bytes go with."""

    def counting(self, rank: Literal["first", "emptiest"]) -> Choices:
        """The same with the bytes of another pp rank."""
        return replace(self, rank=rank, base=self, refusals=Refusals(), _tables={}, _fitting={})

    def arrangements(self, times: float = 1.0) -> Iterator[Arrangement]:
        """Every arrangement, on devices with so many times their memory."""
        able = self.problem.capabilities
        together = set(sharing(self.problem.workflow.model_stages, able.placement))
        for each in self._arrangements(times):
            yield from self._alike(each, together) if together else (each,)

    def _alike(self, each: Arrangement, together: Collection[ModelStage]) -> Iterator[Arrangement]:
        """An arrangement once for each number of devices that all which must have the same can have."""
        shared = [level for level, ms in enumerate(each.program.levels) if ms in together]
        counts = {}
        for level in shared:
            ms = each.program.levels[level]
            site, rows = each.sites[ms], self._grid[ms, each.sites[ms]].rows[each.tables[level].row]
            node = gcd(*site.sizes)
            block = np.where(rows.tp * rows.cp <= node, rows.tp * rows.cp, rows.tp)
            # Blocks that leave devices of a node idle would have other devices than the rest.
            counts[level] = np.where(node % block == 0, rows.devices, 0)
        for count in sorted(set.intersection(*(set(found.tolist()) for found in counts.values())) - {0}, reverse=True):
            tables = list(each.tables)
            for level in shared:
                tables[level] = tables[level][counts[level] == count]
            yield replace(each, tables=tuple(tables), key=(each.key, count))

    def _arrangements(self, times: float) -> Iterator[Arrangement]:
        self.times = times
        pins = self.problem.capabilities.pins
        held = {device for pin in pins.values() for device in pin.devices or ()}
        if not self._sites:
            pool = whole(self.problem.cluster, self.problem.current, held)
            self._sites = (pool,) if pool.regular else (pool, *pool.alike())
        pool, *parts = self._sites
        if held:
            yield from self._pinned(pool, held)
        elif pool.regular:
            yield from self._regular(pool)
        else:
            yield from self._together(pool)
            for part in parts[:2]:
                yield from self._regular(part)
            if len(parts) > 1:
                yield from self._split(parts[0], parts[1])

    @property
    def _restricted(self) -> bool:
        return self.problem.capabilities.placement != "any"

    @property
    def _shapes(self) -> tuple[Shape, ...]:
        return shapes(self.problem.workflow.model_stages, self.problem.capabilities.placement)

    def table(self, model_stage: ModelStage, site: Site) -> Table:
        """The candidates of a model-stage that fit a site, without those that another of equal degrees beats."""
        key = (model_stage, site, self.times)
        if key not in self._fitting:
            table = self._every(model_stage, site)
            alone = table.resident + table.transient <= self._room(site)
            if self.times == 1.0 and site not in self._whole:
                beyond = table.row[~alone]
                self.refusals.add(
                    "does not fit in memory, even alone", list(beyond), self._grid[model_stage, site].label
                )
            fitting = table[alone]
            self._fitting[key] = fitting.undominated() if alone.any() and self.times < ENDLESS else fitting
        return self._fitting[key]

    def candidates(self, model_stage: ModelStage, site: Site) -> Table:
        """The candidates of a model-stage that fit a site, those that another of equal degrees beats included."""
        table = self._every(model_stage, site)
        return table[table.resident + table.transient <= self._room(site)]

    def exists(self, model_stage: ModelStage) -> bool:
        """Whether a model-stage has a candidate at all, on devices of any memory."""
        return any(len(table) for (ms, _), table in self._tables.items() if ms == model_stage)

    def _every(self, model_stage: ModelStage, site: Site) -> Table:
        key = (model_stage, site)
        if key not in self._tables:
            if site in self._whole:
                return self._sliced(model_stage, site)
            if self.base is not None:
                self._tables[key] = self._loose(model_stage, site, self.base._every(model_stage, site))
                return self._tables[key]
            if site not in self._grids:
                self._grids[site] = Grids(self.problem, site.sizes, self.refusals)
            self._grid[key] = self._grids[site].of(model_stage)
            self._tables[key] = self._priced(self._grid[key], site)
            self.considered += len(self._grid[key].rows)
        return self._tables[key]

    def _sliced(self, model_stage: ModelStage, site: Site) -> Table:
        """The rows of equal nodes that some of them have room for."""
        whole, nodes = self._whole[site], len(site.nodes)
        table = self._every(model_stage, whole)
        table, grid = table[table.slots <= nodes], self._grid[model_stage, whole]
        if nodes == 1:
            grid = replace(grid, slots=grid.rows.devices)
            table = replace(table, slots=grid.slots[table.row])
        self._grid[model_stage, site], self._tables[model_stage, site] = grid, table
        return table

    def _slice(self, site: Site, first: int, last: int) -> Site:
        """Some neighbours of equal nodes."""
        key = (site, first, last)
        if key not in self._slices:
            self._slices[key] = part = Site(site.nodes[first:last], site.kinds[first:last])
            self._whole[part] = self._whole.get(site, site)
        return self._slices[key]

    def plan(self, arrangement: Arrangement, found: Found) -> Plan:
        """A choice with devices."""
        chosen: dict[ModelStage, tuple[Candidate, int]] = {}
        for model_stage, row in zip(arrangement.program.levels, found.rows, strict=True):
            site = arrangement.sites[model_stage]
            grid = self._grid[model_stage, site]
            chosen[model_stage] = (
                grid.candidate(row), int(grid.slots[row]) if site.regular else len(site.slots)
            )  # fmt: skip
        return shared_out(arrangement.program.shape, arrangement.sites, chosen, self.problem.current)

    def _regular(self, site: Site) -> Iterator[Arrangement]:
        nodes = len(site.nodes)
        inside = self._slice(site, 0, 1) if nodes > 1 else None
        known: dict[Site, tuple[dict[ModelStage, Table], dict[ModelStage, Site], float]] = {}
        for program in programs(self.problem.workflow, self._shapes if self._restricted else ()):
            where = site if width(program) <= len(site.slots) else inside
            if where is not None:
                if where not in known:
                    tables = {ms: self.table(ms, where) for ms in program.levels}
                    known[where] = tables, dict.fromkeys(program.levels, where), self._room(where)
                tables, sites, room = known[where]
                found, rooms = tuple(tables[ms] for ms in program.levels), (room,) * len(program.stored)
                yield Arrangement(program, found, len(where.slots), rooms, sites, where)
        if inside is not None and sum(site.sizes) <= EXACT_POOL:
            yield from self._split(self._slice(site, 0, nodes - 1), self._slice(site, nodes - 1, nodes), beside=True)

    def _together(self, site: Site) -> Iterator[Arrangement]:
        """All of an irregular site in turns: there every model-stage counts as needing all of it."""
        for program in programs(self.problem.workflow, self._shapes):
            if program.colocated and not program.devices:
                yield self._on(program, dict.fromkeys(program.levels, site), 1, (1,))

    def _split(self, one: Site, other: Site, beside: bool = False) -> Iterator[Arrangement]:
        """Partitions on two sites; slots are counted in parts that both sites are whole numbers of.

        With `beside` only if groups lie side by side in a single node; elsewhere whole nodes do as well.
        """
        every = tuple(shape for shape in self._shapes if len(shape.partitions) == 2)
        for program in programs(self.problem.workflow, every, split=True) if every else ():
            widths = [width(program, partition) for partition in (0, 1)]
            for pair in ((one, other), (other, one)):
                single = [len(site.nodes) == 1 and wide > 1 for site, wide in zip(pair, widths, strict=True)]
                if not any(single) if beside else any(single) and sum(self._sites[0].sizes) > EXACT_POOL:
                    continue
                parts = [
                    site if wide <= len(site.slots) else self._slice(site, 0, 1)
                    for site, wide in zip(pair, widths, strict=True)
                ]
                slots = lcm(*(len(part.slots) for part in parts))
                where = {ms: parts[home] for ms, home in zip(program.levels, program.home, strict=True)}
                yield self._on(program, where, slots, tuple(slots // len(where[ms].slots) for ms in program.levels))

    def _pinned(self, pool: Site, held: set[int]) -> Iterator[Arrangement]:
        workflow, pins = self.problem.workflow, self.problem.capabilities.pins
        rest = self._part(pool, set(pool.devices) - held)
        fixed = {ms: self._part(pool, pin.devices) for ms, pin in pins.items() if pin.devices}
        for free in (pool, rest) if rest.nodes else (pool,):
            sites = {ms: fixed.get(ms, free) for ms in workflow.model_stages}
            groups: list[tuple[ModelStage, ...]] = []
            for ms in workflow.model_stages:
                mine = set(sites[ms].devices)
                near = [g for g in groups if g[0].stage is ms.stage and any(mine & set(sites[o].devices) for o in g)]
                groups = [g for g in groups if g not in near] + [(*(one for g in near for one in g), ms)]
            (program,) = programs(workflow, (Shape((tuple(groups),)),), split=True)
            yield self._on(program, sites, len(program.levels), tuple(1 for _ in program.levels), alone=True)

    def _part(self, pool: Site, devices: Collection[int]) -> Site:
        key = frozenset(devices)
        if key not in self._only:
            self._only[key] = pool.only(key)
        return self._only[key]

    def _on(
        self,
        program: Program,
        sites: Mapping[ModelStage, Site],
        slots: int,
        scales: Sequence[int] = (),
        alone: bool = False,
    ) -> Arrangement:
        tables = []
        for level, ms in enumerate(program.levels):
            table = self.table(ms, sites[ms])
            if alone or not sites[ms].regular:
                table = replace(table, slots=np.ones(len(table), dtype=np.int64))
            elif scales and scales[level] != 1:
                table = replace(table, slots=table.slots * scales[level])
            tables.append(table)
        rooms = [
            min(self._room(sites[ms]) for ms, home in zip(program.levels, program.home, strict=True) if home == index)
            for index in range(len(program.shape.partitions))
        ]
        return Arrangement(program, tuple(tables), slots, tuple(rooms), sites, tuple(sites.values()))

    def _room(self, site: Site) -> float:
        return self.times * min(self.problem.usable(kind) for kind in set(site.kinds))

    def _loose(self, model_stage: ModelStage, site: Site, table: Table) -> Table:
        """A table with the bytes of the pp rank that counts; endless where another rank does not fit alone."""
        grid = self._grid[model_stage, site]
        stored, added = np.full(len(grid.rows), np.inf), np.full(len(grid.rows), np.inf)
        for kinds, which in _reached(grid, site):
            resident, transient, there = self.model.rank_memory(model_stage, grid.rows[which], kinds)
            if self.rank == "first":
                least = resident[0], transient[0]
            else:
                least = tuple(np.where(there, each, np.inf).min(axis=0) for each in (resident, transient))
            beyond = (there & (resident + transient > self._room(site))).any(axis=0)
            stored[which], added[which] = np.where(beyond, np.inf, least[0]), least[1]
        return replace(table, resident=stored[table.row], transient=added[table.row], _weights={})

    def _priced(self, grid: Grid, site: Site) -> Table:
        """What every row costs at the pace of the slowest node that it reaches."""
        rows, calls = grid.rows, [call.name for call in self.problem.workflow.calls_of(grid.model_stage)]
        columns = [np.full(len(rows), np.inf) for _ in range(len(calls) + 3)]
        for kinds, which in _reached(grid, site):
            if not which.any():
                continue
            prices = self.model.price(grid.model_stage, rows if which.all() else rows[which], kinds)
            found = [*(prices.call_s[name] for name in calls), prices.sync_s]
            found += [prices.resident_bytes, prices.transient_bytes]
            if which.all():
                columns = found
                break
            for column, values in zip(columns, found, strict=True):
                column[which] = values
        *seconds, sync_s, resident, transient = columns
        table = Table(tuple(seconds), sync_s, grid.slots, resident, transient, layouts(rows), np.arange(len(rows)))
        finite = np.isfinite(sum(seconds) + sync_s)
        return table if finite.all() else table[finite]


@cache
def width(program: Program, partition: int | None = None) -> int:
    """Groups that lie side by side, in one partition or in all."""
    chosen = [level for level, home in enumerate(program.home) if partition in (None, home)]
    return max((1, *(sum(terms[level] for level in chosen) for terms in program.devices)))


def layouts(rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Equal numbers for equal degrees; the last digits are the replicas."""
    return ((rows.tp * 1024 + rows.pp) * 1024 + rows.cp) * REPLICAS + rows.dp


REPLICAS = 1 << 20


def _reached(grid: Grid, site: Site) -> Iterator[tuple[frozenset[str], Bools]]:
    """Rows by the kinds of the nodes they reach."""
    if len(set(site.kinds)) == 1:
        yield frozenset(site.kinds[:1]), np.ones(len(grid.rows), dtype=np.bool_)
        return
    distinct = [len(set(site.kinds[: index + 1])) for index in range(len(site.kinds))]
    reached = np.array(distinct)[grid.slots - 1]
    for count in sorted(set(distinct)):
        yield frozenset(site.kinds[: distinct.index(count) + 1]), reached == count
