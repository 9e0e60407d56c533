"""When nothing fits: the plan that comes closest, and what it lacks."""

from __future__ import annotations

import numpy as np

from nereus.core import Assignment, InfeasibleError, Plan
from nereus.planning.arrange import arrangements
from nereus.planning.judge import explain_shortage, shortage
from nereus.planning.options import Array, OptionTable
from nereus.planning.problem import Problem
from nereus.planning.tree import Job, Tree


def nothing_fits(problem: Problem, job: Job, table: OptionTable) -> InfeasibleError:
    """The error that says what the leanest plan lacks, on which device and why."""
    where = f"no plan fits {len(table.pool)} devices"
    for model_stage in job.levels:
        if table.options(model_stage, table.pool, fitting=False) is None:
            reasons = {r.reason for r in table.refusals.all() if r.plan.startswith(str(model_stage))}
            return InfeasibleError(f"{where}: {model_stage} has no layout there ({'; '.join(sorted(reasons))})")
    plan = _Leanest(problem, job, table).plan()
    if plan is None:
        return InfeasibleError(f"{where} with the devices that are pinned")
    peaks = job.model.peaks(plan)
    return InfeasibleError(
        f"{where}; the one that needs least is {plan.describe()}: {explain_shortage(problem, peaks)}",
        shortage(problem, peaks),
    )


class _Leanest:
    """Branch and bound for the plan whose fullest device needs the smallest share of its capacity."""

    def __init__(self, problem: Problem, job: Job, table: OptionTable) -> None:
        self.problem = problem
        self.job = job
        self.table = table
        self.share = float("inf")
        self.best: tuple[Assignment, ...] | None = None

    def plan(self) -> Plan | None:
        """The leanest plan; None without any arrangement in which every model-stage has a layout."""
        zeros = np.zeros(len(self.table.pool))
        tried = arrangements(self.problem.workflow.model_stages, self.table.pool, self.problem.capabilities)
        for arrangement in tried:
            options = [self.table.options(ms, arrangement.windows[ms], fitting=False) for ms in self.job.levels]
            levels = [entry for entry in options if entry is not None]
            if len(levels) == len(options):
                self._branch(Tree(self.job, levels, self.table.usable), (), zeros, zeros)
        if self.best is None:
            return None
        return Plan(tuple(sorted(self.best, key=lambda a: a.candidate.model_stage.sort_key)))

    def _branch(self, tree: Tree, groups: tuple[int, ...], stored: Array, added: Array) -> None:
        level = len(groups)
        entry = tree.options[level]
        shares = (tree.peaks(level, stored, added) / tree.usable).max(axis=1)
        for group in map(int, np.argsort(shares, kind="stable")):
            if shares[group] >= self.share:
                return
            chosen = (*groups, group)
            if len(chosen) == len(tree.options):
                self._finish(tree, chosen, stored + entry.stored[group])
            else:
                self._branch(tree, chosen, stored + entry.stored[group], np.maximum(added, entry.least_added[group]))

    def _finish(self, tree: Tree, groups: tuple[int, ...], stored: Array) -> None:
        """Take of each group the member that needs least beside what is stored."""
        share, best = 0.0, []
        for entry, group in zip(tree.options, groups, strict=True):
            start, stop = entry.starts[group], entry.stops[group]
            shares = ((stored + entry.added[start:stop]) / tree.usable).max(axis=1)
            member = int(np.argmin(shares))
            share = max(share, float(shares[member]))
            best.append(entry.assignments[start + member])
        if share < self.share:
            self.share, self.best = share, tuple(best)
