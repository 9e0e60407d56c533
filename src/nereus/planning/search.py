"""The fastest plans that fit: branch and bound over all model-stages at once, exact for the arrangements tried.

A step is the longest path of a graph fixed by who shares devices with whom, so it never gets shorter when a call gets
longer: with the fastest time of whatever is not chosen yet it bounds every completion from below. Bytes stored so far
plus the least that the rest must store do the same for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus.core import Assignment, Layout, ModelStage, Plan, Rejection
from nereus.planning.arrange import Arrangement, arrangements
from nereus.planning.judge import Scored, misfit
from nereus.planning.leanest import nothing_fits
from nereus.planning.legal import check_pins
from nereus.planning.options import Group, Options, OptionTable
from nereus.planning.place import Units, pool_order
from nereus.planning.problem import Problem
from nereus.planning.tree import Job, Tree

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
    """Two trees deep: which layouts on which devices, then which micro-batches, recompute modes and KV budgets."""

    def __init__(self, problem: Problem, k: int) -> None:
        self.problem = problem
        self.k = k
        self.job = Job.of(problem.model())
        self.table = OptionTable(problem, self.job.model, pool_order(problem.cluster, problem.current))
        self.found: dict[str, tuple[float, Plan]] = {}
        self.considered = 0
        self._sync_s: dict[tuple[Placed, ...], float] = {}

    def run(self) -> SearchResult:
        model, current = self.job.model, self.problem.current
        if current is not None and misfit(self.problem, model, current) is None:
            self._offer(model.estimate(current).step_s, current)
        for bound_s, arrangement, options, tree in self._trees():
            if bound_s >= self.cutoff_s:
                break
            self._explore(arrangement, options, tree)
        if not self.found:
            raise nothing_fits(self.problem, self.job, self.table)
        ranked = sorted(self.found.values(), key=lambda entry: (_digits(entry[0]), self._changes(entry[1])))
        best = tuple(Scored(plan, model.estimate(plan)) for _, plan in ranked)
        return SearchResult(best, self.table.refusals.all(), self.considered, min(s.estimate.step_s for s in best))

    @property
    def cutoff_s(self) -> float:
        """The step time that a new plan has to beat."""
        return max(step_s for step_s, _ in self.found.values()) if len(self.found) >= self.k else float("inf")

    def _trees(self) -> list[tuple[float, Arrangement, list[Options], Tree]]:
        """Every arrangement in which each model-stage has an option that fits alone, lowest bound first."""
        trees = []
        tried = arrangements(self.problem.workflow.model_stages, self.table.pool, self.problem.capabilities)
        for arrangement in tried:
            options = [self.table.options(ms, arrangement.windows[ms]) for ms in self.job.levels]
            levels = [entry for entry in options if entry is not None]
            if len(levels) == len(options):
                tree = Tree(self.job, [entry.choices for entry in levels])
                trees.append((tree.bound_s, arrangement, levels, tree))
        return sorted(trees, key=lambda entry: entry[0])

    def _explore(self, arrangement: Arrangement, options: list[Options], tree: Tree) -> None:
        def sync(chosen: Sequence[int]) -> float | None:
            if len(chosen) != len(self.job.synced) or not chosen:
                return None
            return self._synchronise([options[level].groups[row].assignments[0] for level, row in enumerate(chosen)])

        for rows, _, sync_s in tree.completions(self.table.usable, lambda: self.cutoff_s, sync):
            self._refine(arrangement, [entry.groups[row] for entry, row in zip(options, rows, strict=True)], sync_s)

    def _refine(self, arrangement: Arrangement, groups: list[Group], sync_s: float) -> None:
        """The fastest members of the groups that fit together."""
        name = " ".join(f"{g.assignments[0].candidate.layout} dp{g.assignments[0].candidate.dp}" for g in groups)

        def cutoff_s() -> float:
            return min(self.cutoff_s, self.found[name][0] if name in self.found else float("inf"))

        tree = Tree(self.job, [group.rows for group in groups], sync_s)
        self.considered += 1
        if tree.bound_s >= cutoff_s():
            return
        for rows, step_s, _ in tree.completions(self.table.usable, cutoff_s, lambda _: None):
            chosen = [group.assignments[row] for group, row in zip(groups, rows, strict=True)]
            ordered = sorted(chosen, key=lambda a: a.candidate.model_stage.sort_key)
            self._offer(step_s, Plan(tuple(ordered), arrangement.partitions))

    def _synchronise(self, assignments: Sequence[Assignment]) -> float:
        key = tuple(map(_placed, assignments))
        if key not in self._sync_s:
            placed = {a.candidate.model_stage: a for a in assignments}
            pairs = [(placed[source], placed[target]) for source, target in self.problem.workflow.weight_syncs]
            self._sync_s[key] = self.job.model.sync_cost(pairs).seconds
        return self._sync_s[key]

    def _offer(self, step_s: float, plan: Plan) -> None:
        """Keep a plan if it is the fastest with its layouts, and those among the `k` fastest."""
        levels = [plan.of(model_stage).candidate for model_stage in self.job.levels]
        name = " ".join(f"{candidate.layout} dp{candidate.dp}" for candidate in levels)
        if step_s < self.found.get(name, (float("inf"),))[0]:
            self.found[name] = (step_s, plan)
        if len(self.found) > self.k:
            del self.found[max(self.found, key=lambda key: self.found[key][0])]

    def _changes(self, plan: Plan) -> int:
        """Model-stages that would differ from the current plan."""
        current = self.problem.current
        now = {_placed(a) for a in current.assignments} if current else set()
        return sum(_placed(a) not in now for a in plan.assignments)


def _placed(assignment: Assignment) -> Placed:
    candidate = assignment.candidate
    return (candidate.model_stage, candidate.layout, assignment.units)


def _digits(seconds: float) -> float:
    return float(f"{seconds:.{TIE_DIGITS}g}")
