"""The fastest plans that fit: branch and bound over all model-stages at once, exact for the arrangements tried.

A step is the longest path of a graph fixed by who shares devices with whom, so it never gets shorter when a call gets
longer: with the fastest time of whatever is not chosen yet it bounds every completion from below. Bytes stored so far
plus the least that the rest must store do the same for memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.core import ModelStage, Plan, Rejection
from nereus.cost.schedule import SYNC
from nereus.planning.arrange import arrangements
from nereus.planning.judge import Scored, misfit
from nereus.planning.leanest import nothing_fits
from nereus.planning.legal import check_pins
from nereus.planning.options import Array, OptionTable
from nereus.planning.place import pool_order
from nereus.planning.problem import Problem
from nereus.planning.tree import Seconds, Tree

TIE_DIGITS = 9
"""Plans whose times agree in so many digits are equally fast."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`best` fastest first, no two with the same layouts on the same devices. No plan tried is below `bound_s`."""

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


@dataclass(frozen=True, slots=True)
class _Node:
    """Options chosen so far and what they use of every pool device; `seconds` bounds the calls not chosen yet."""

    chosen: tuple[int, ...]
    stored: Array
    added: Array
    seconds: Seconds


class _Search:
    def __init__(self, problem: Problem, k: int) -> None:
        self.problem = problem
        self.k = k
        self.model = problem.model()
        self.pool = pool_order(problem.cluster, problem.current)
        self.usable = np.array([problem.usable_bytes(device) for device in self.pool], dtype=np.float64)
        self.table = OptionTable(problem, self.model, self.pool)
        self.levels = _levels(problem)
        self.found: dict[str, tuple[float, Plan]] = {}
        self.cutoff_s = float("inf")
        self.considered = 0

    def run(self) -> SearchResult:
        current = self.problem.current
        if current is not None and misfit(self.problem, self.model, current) is None:
            self._offer(self.model.estimate(current).step_s, current)
        zeros = np.zeros(len(self.pool))
        for bound_s, tree in self._trees():
            if bound_s >= self.cutoff_s:
                break
            self._branch(tree, _Node((), zeros, zeros, tree.least_seconds))
        if not self.found:
            raise nothing_fits(self.problem, self.model, self.table, self.levels)
        ranked = sorted(self.found.values(), key=lambda entry: (_digits(entry[0]), self._changes(entry[1])))
        best = tuple(Scored(plan, self.model.estimate(plan)) for _, plan in ranked[: self.k])
        return SearchResult(best, self.table.refusals.all(), self.considered, min(s.estimate.step_s for s in best))

    def _trees(self) -> list[tuple[float, Tree]]:
        """Every arrangement in which each model-stage has an option that fits alone, lowest bound first."""
        trees: list[tuple[float, Tree]] = []
        for arrangement in arrangements(self.problem.workflow.model_stages, self.pool, self.problem.capabilities):
            options = [self.table.options(ms, arrangement.windows[ms]) for ms in self.levels]
            if all(len(entry) for entry in options):
                tree = Tree(self.model, arrangement, self.levels, options)
                trees.append((float(tree.bound_s(tree.least_seconds)), tree))
        return sorted(trees, key=lambda entry: entry[0])

    def _branch(self, tree: Tree, node: _Node) -> None:
        """Complete a choice in every way that may still be among the best, most promising first."""
        level = len(node.chosen)
        options = tree.options[level]
        rows = np.flatnonzero((tree.bytes(level, node.stored, node.added) <= self.usable).all(axis=1))
        bounds = tree.bounds_s(level, rows, node.seconds)
        for index in np.argsort(bounds, kind="stable"):
            if bounds[index] >= self.cutoff_s:
                return
            row = int(rows[index])
            seconds = {**node.seconds, **dict(zip(tree.calls[level], map(float, options.seconds[row]), strict=True))}
            chosen = (*node.chosen, row)
            sync_s = tree.sync_s(chosen) if SYNC in seconds and not seconds[SYNC] else None
            if sync_s is not None:
                seconds[SYNC] = sync_s
            if len(chosen) == len(tree.levels):
                self.considered += 1
                self._offer(tree.step_s(chosen, {call: float(s) for call, s in seconds.items()}), tree.plan(chosen))
            else:
                stored = node.stored + options.stored[row]
                added = np.maximum(node.added, options.added[row])
                self._branch(tree, _Node(chosen, stored, added, seconds))

    def _offer(self, step_s: float, plan: Plan) -> None:
        """Keep a plan if it is the fastest with its layouts and devices, and among the `k` fastest of all."""
        if step_s >= self.cutoff_s:
            return
        name = plan.describe()
        if name not in self.found or step_s < self.found[name][0]:
            self.found[name] = (step_s, plan)
        if len(self.found) > self.k:
            del self.found[max(self.found, key=lambda key: self.found[key][0])]
        if len(self.found) == self.k:
            self.cutoff_s = max(step_s for step_s, _ in self.found.values())

    def _changes(self, plan: Plan) -> int:
        """Model-stages that would differ from the current plan."""
        current = self.problem.current
        if current is None:
            return 0
        now = {a.candidate.model_stage: (a.candidate.layout, frozenset(a.units)) for a in current.assignments}
        return sum(
            now.get(a.candidate.model_stage) != (a.candidate.layout, frozenset(a.units)) for a in plan.assignments
        )


def _levels(problem: Problem) -> tuple[ModelStage, ...]:
    """Model-stages of a weight synchronisation first, so that its time is known early."""
    synced = [model_stage for pair in problem.workflow.weight_syncs for model_stage in pair]
    return tuple(dict.fromkeys((*synced, *problem.workflow.model_stages)))


def _digits(seconds: float) -> float:
    return float(f"{seconds:.{TIE_DIGITS}g}")
