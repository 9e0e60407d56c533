"""The fastest plans that fit: branch and bound over all model-stages at once, exact for the arrangements tried.

A step is the longest path of a graph fixed by who shares devices with whom, so it never gets shorter when a call gets
longer: with the fastest time of whatever is not chosen yet it bounds every completion from below. Bytes stored so far
plus the least that the rest must store do the same for memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import product

import numpy as np
from numpy.typing import NDArray

from nereus.core import Assignment, Candidate, Layout, ModelStage, Plan, Rejection
from nereus.cost.schedule import SYNC
from nereus.planning.arrange import Arrangement, arrangements
from nereus.planning.judge import Scored, misfit
from nereus.planning.leanest import nothing_fits
from nereus.planning.legal import check_pins
from nereus.planning.options import Array, OptionTable
from nereus.planning.place import Units, pool_order
from nereus.planning.problem import Problem
from nereus.planning.tree import Job, Node, Tree

Placed = tuple[ModelStage, Layout, Units]

TIE_DIGITS = 9
"""Plans whose times agree in so many digits are equally fast."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`best` fastest first, no two with the same layouts and replicas. No plan tried is below `bound_s`."""

    best: tuple[Scored, ...]
    refused: tuple[Rejection, ...]
    considered: int
    bound_s: float


def search(problem: Problem, k: int = 8) -> SearchResult:
    """The `k` fastest plans that fit; equally fast ones in favour of the current plan.

    Raises SettingsError for a pin that no plan can meet, InfeasibleError when nothing fits.
    """
    check_pins(problem)
    return _Search(problem, k).run()


class _Search:
    def __init__(self, problem: Problem, k: int) -> None:
        self.problem = problem
        self.k = k
        self.job = Job.of(problem.model())
        self.table = OptionTable(problem, self.job.model, pool_order(problem.cluster, problem.current))
        self.found: dict[tuple[Candidate, ...], tuple[float, Plan]] = {}
        self.considered = 0
        self._sync_s: dict[tuple[Placed, ...], float] = {}

    def run(self) -> SearchResult:
        model, current = self.job.model, self.problem.current
        if current is not None and misfit(self.problem, model, current) is None:
            self._offer(model.estimate(current).step_s, current)
        for arrangement, tree in self._trees():
            for leaf in tree.leaves(lambda: self.cutoff_s, partial(self._synchronise, tree)):
                self.considered += 1
                self._refine(arrangement, tree, leaf)
        if not self.found:
            raise nothing_fits(self.problem, self.job, self.table)
        ranked = sorted(self.found.values(), key=lambda entry: (_digits(entry[0]), self._changes(entry[1])))
        best = tuple(Scored(plan, model.estimate(plan)) for _, plan in ranked)
        return SearchResult(best, self.table.refusals.all(), self.considered, min(s.estimate.step_s for s in best))

    @property
    def cutoff_s(self) -> float:
        """The step time that a new plan has to beat."""
        return max(step_s for step_s, _ in self.found.values()) if len(self.found) >= self.k else float("inf")

    def _trees(self) -> Iterator[tuple[Arrangement, Tree]]:
        """Arrangements in which every model-stage has an option, lowest bound first, while it is below the cutoff.

        The cheap bound of a tree is replaced by a better one when its turn comes.
        """
        waiting: list[tuple[float, int, bool]] = []
        trees: list[tuple[Arrangement, Tree]] = []
        for arrangement in arrangements(self.problem.workflow.model_stages, self.table.pool, self.problem.capabilities):
            options = [self.table.options(ms, arrangement.windows[ms]) for ms in self.job.levels]
            levels = [entry for entry in options if entry is not None]
            if len(levels) == len(options):
                trees.append((arrangement, Tree(self.job, levels, self.table.usable)))
                waiting.append((trees[-1][1].bound_s(), len(waiting), False))
        heapify(waiting)
        while waiting:
            bound_s, number, tight = heappop(waiting)
            if bound_s >= self.cutoff_s:
                return
            arrangement, tree = trees[number]
            if tight:
                yield arrangement, tree
            else:
                tree.tighten()
                heappush(waiting, (tree.bound_s(), number, True))

    def _refine(self, arrangement: Arrangement, tree: Tree, leaf: Node) -> None:
        """The fastest plan with the groups of a leaf: every way to trade one call's time for another's."""
        waits, room = tree.exact_waits(leaf.groups), tree.usable - leaf.stored
        choices = [
            [(entry.assignments[row], dict(zip(names, map(float, entry.seconds[row]), strict=True))) for row in rows]
            for names, entry, group in zip(self.job.calls, tree.options, leaf.groups, strict=True)
            for rows in (_front(entry.seconds, entry.members(group, room)),)
        ]
        for chosen in product(*choices):
            times = dict(leaf.seconds)
            for _, seconds in chosen:
                times.update(seconds)
            step_s = tree.step_s(waits, times)
            if step_s < self.cutoff_s:
                assignments = sorted((a for a, _ in chosen), key=lambda a: a.candidate.model_stage.sort_key)
                self._offer(step_s, Plan(tuple(assignments), arrangement.partitions))

    def _synchronise(self, tree: Tree, groups: Sequence[int]) -> float:
        """Seconds of the weight synchronisation between groups, remembered by layout and devices."""
        first = [entry.assignments[entry.starts[group]] for entry, group in zip(tree.options, groups, strict=False)]
        key = tuple(map(_placed, first))
        if key not in self._sync_s:
            self._sync_s[key] = sum(self.job.model.costs(a)[SYNC].seconds for a in first)
        return self._sync_s[key]

    def _offer(self, step_s: float, plan: Plan) -> None:
        """Keep a plan if it is the fastest with its layouts, and those among the `k` fastest."""
        name = tuple(Candidate(ms, c.layout, c.dp) for ms in self.job.levels for c in (plan.of(ms).candidate,))
        if step_s < self.found.get(name, (float("inf"),))[0]:
            self.found[name] = (step_s, plan)
        if len(self.found) > self.k:
            del self.found[max(self.found, key=lambda key: self.found[key][0])]

    def _changes(self, plan: Plan) -> int:
        """Model-stages that would differ from the current plan."""
        current = self.problem.current
        now = {_placed(a) for a in current.assignments} if current else set()
        return sum(_placed(a) not in now for a in plan.assignments)


def _front(seconds: Array, rows: NDArray[np.intp]) -> list[int]:
    """The rows that no other matches in every call; of equal ones the first."""
    front: list[int] = []
    for row in map(int, rows):
        others = [other for other in map(int, rows) if other != row and np.all(seconds[other] <= seconds[row])]
        if all(np.all(seconds[other] == seconds[row]) and other > row for other in others):
            front.append(row)
    return front


def _placed(assignment: Assignment) -> Placed:
    candidate = assignment.candidate
    return (candidate.model_stage, candidate.layout, assignment.units)


def _digits(seconds: float) -> float:
    return float(f"{seconds:.{TIE_DIGITS}g}")
