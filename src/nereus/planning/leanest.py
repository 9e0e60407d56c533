"""When nothing fits: the plan that comes closest, and what it lacks."""

from __future__ import annotations

import numpy as np

from nereus.core import Assignment, InfeasibleError, Plan
from nereus.planning.arrange import arrangements
from nereus.planning.judge import explain_shortage, shortage
from nereus.planning.options import Array, Group, Options, OptionTable
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
                self._branch(Tree(self.job, [entry.choices for entry in levels]), levels, (), zeros, zeros)
        if self.best is None:
            return None
        return Plan(tuple(sorted(self.best, key=lambda a: a.candidate.model_stage.sort_key)))

    def _branch(self, tree: Tree, options: list[Options], chosen: tuple[int, ...], stored: Array, added: Array) -> None:
        level = len(chosen)
        rows = options[level].choices
        shares = (tree.peaks(level, stored, added) / self.table.usable).max(axis=1)
        for row in map(int, np.argsort(shares, kind="stable")):
            if shares[row] >= self.share:
                return
            picked = (*chosen, row)
            if len(picked) == len(options):
                self._finish([entry.groups[index] for entry, index in zip(options, picked, strict=True)])
            else:
                self._branch(tree, options, picked, stored + rows.stored[row], np.maximum(added, rows.added[row]))

    def _finish(self, groups: list[Group]) -> None:
        """Take of each group the member that adds least."""
        members = [int(np.argmin(group.rows.added.max(axis=1))) for group in groups]
        stored = sum(group.rows.stored[member] for group, member in zip(groups, members, strict=True))
        added = np.max([group.rows.added[member] for group, member in zip(groups, members, strict=True)], axis=0)
        share = float(((stored + added) / self.table.usable).max())
        if share < self.share:
            self.share = share
            self.best = tuple(group.assignments[member] for group, member in zip(groups, members, strict=True))
