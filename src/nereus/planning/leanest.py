"""When nothing fits: the plan that comes closest, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nereus.core import InfeasibleError, ModelStage, Plan
from nereus.cost.step import StepModel
from nereus.planning.arrange import arrangements
from nereus.planning.judge import explain_shortage, shortage
from nereus.planning.options import Array, OptionTable
from nereus.planning.problem import Problem
from nereus.planning.tree import Tree


def nothing_fits(
    problem: Problem, model: StepModel, table: OptionTable, levels: Sequence[ModelStage]
) -> InfeasibleError:
    """The error that says what the leanest plan lacks, on which device and why."""
    for model_stage in levels:
        if not len(table.options(model_stage, table.pool, fitting=False)):
            reasons = sorted({r.reason for r in table.refusals.all() if r.plan.startswith(str(model_stage))})
            return InfeasibleError(
                f"no plan fits {len(table.pool)} devices: {model_stage} has no layout there"
                + (f" ({'; '.join(reasons)})" if reasons else "")
            )
    plan = _Leanest(problem, model, table, levels).plan()
    if plan is None:
        return InfeasibleError(f"no plan fits {len(table.pool)} devices with the pins that are set")
    peaks = model.peaks(plan)
    return InfeasibleError(
        f"no plan fits {len(table.pool)} devices; the one that needs least is {plan.describe()}: "
        f"{explain_shortage(problem, peaks)}",
        shortage(problem, peaks),
    )


class _Leanest:
    """Branch and bound for the plan whose fullest device needs the smallest share of its capacity."""

    def __init__(self, problem: Problem, model: StepModel, table: OptionTable, levels: Sequence[ModelStage]) -> None:
        self.capacity = np.array([problem.usable_bytes(device) for device in table.pool], dtype=np.float64)
        self.trees: list[Tree] = []
        for arrangement in arrangements(problem.workflow.model_stages, table.pool, problem.capabilities):
            options = [table.options(ms, arrangement.windows[ms], fitting=False) for ms in levels]
            if all(len(entry) for entry in options):
                self.trees.append(Tree(model, arrangement, levels, options))
        self.best: Plan | None = None
        self.share = float("inf")

    def plan(self) -> Plan | None:
        """The leanest plan; None without any arrangement in which every model-stage has a layout."""
        for tree in self.trees:
            zeros = np.zeros(len(self.capacity))
            if ((tree.least_stored[0] + tree.least_added[0]) / self.capacity).max() < self.share:
                self._branch(tree, (), zeros, zeros)
        return self.best

    def _branch(self, tree: Tree, chosen: tuple[int, ...], stored: Array, added: Array) -> None:
        level = len(chosen)
        options = tree.options[level]
        shares = (tree.bytes(level, stored, added) / self.capacity).max(axis=1)
        for row in map(int, np.argsort(shares, kind="stable")):
            if shares[row] >= self.share:
                return
            picked = (*chosen, row)
            if len(picked) == len(tree.levels):
                self.best, self.share = tree.plan(picked), float(shares[row])
            else:
                self._branch(tree, picked, stored + options.stored[row], np.maximum(added, options.added[row]))
