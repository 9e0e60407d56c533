"""The choice of candidates as a mixed-integer program, solved by SCIP: one binary for each candidate.

Written apart from the planner, from the rules of `brute_force_plans.py`: a binary for every way to share the pool, one
for every pair of calls of which one may have to wait for the other, and times, slots and bytes of the chosen candidates
as continuous variables. `upper_s`, the length of some known step, bounds the program in the solver's favour.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from nereus.core import ModelStage, Workflow
from tests.oracles.brute_force_plans import Array, Home, data_edges, homes


@dataclass(frozen=True)
class Columns:
    """The candidates of one model-stage."""

    call_s: Mapping[str, Array]
    sync_s: Array
    slots: Array
    resident: Array
    transient: Array


@dataclass(frozen=True)
class Answer:
    """What SCIP found and proved, in seconds (0 where it proved nothing), and the CPU time it took."""

    status: str
    step_s: float
    bound_s: float
    solve_s: float
    binaries: int


def solve(
    workflow: Workflow,
    columns: Mapping[ModelStage, Columns],
    slots: int,
    room: float,
    upper_s: float,
    limit_s: float = 60.0,
    written_to: Path | None = None,
) -> Answer:
    """Build the program, write it to a file if asked to, and solve it."""
    program = _Program(workflow, columns, slots, room, upper_s)
    scip = program.scip
    if written_to is not None:
        scip.writeProblem(str(written_to), verbose=False)
    scip.setParam("timing/clocktype", 1)  # CPU time, so that a busy machine takes nothing from it
    scip.setParam("limits/time", limit_s)
    began_s = time.process_time()
    scip.optimize()
    solve_s = time.process_time() - began_s
    step_s = float(scip.getObjVal()) if scip.getNSols() else float("inf")
    return Answer(scip.getStatus(), step_s, max(float(scip.getDualbound()), 0.0), solve_s, program.binaries)


class _Program:
    def __init__(
        self, workflow: Workflow, columns: Mapping[ModelStage, Columns], slots: int, room: float, upper_s: float
    ) -> None:
        from pyscipopt import Model, quicksum

        self.scip: Any = Model()
        self.scip.hideOutput()
        self.sum = quicksum
        self.workflow = workflow
        self.slots = slots
        self.room = room
        self.upper_s = upper_s
        self.binaries = 0
        self.of: dict[tuple[ModelStage, str], Any] = {}
        for ms, each in columns.items():
            self._choose(ms, each)
        self.ways = list(homes(workflow.model_stages))
        self.way = [self.scip.addVar(vtype="B", name=f"way_{index}") for index in range(len(self.ways))]
        self.scip.addCons(self.sum(self.way) == 1)
        self._times()
        for home, used in zip(self.ways, self.way, strict=True):
            self._limits(home, used)

    def _choose(self, ms: ModelStage, columns: Columns) -> None:
        """Exactly one candidate; its quantities in variables."""
        near = np.flatnonzero(sum(columns.call_s.values()) <= self.upper_s)
        taken = [self.scip.addVar(vtype="B", name=f"{ms}_{row}") for row in near]
        self.binaries += len(taken)
        self.scip.addCons(self.sum(taken) == 1)
        quantities = {
            **columns.call_s, "sync": columns.sync_s, "slots": columns.slots / self.slots,
            "resident": columns.resident / self.room, "transient": columns.transient / self.room,
        }  # fmt: skip
        for name, values in quantities.items():
            variable = self.scip.addVar(lb=0.0, name=f"{ms}_{name}")
            self.of[ms, name] = variable
            self.scip.addCons(variable == self.sum(float(values[row]) * x for row, x in zip(near, taken, strict=True)))

    def _times(self) -> None:
        """A call ends its time after whoever it waits for; the synchronisations come last."""
        owner = {call.name: call.model_stage for call in self.workflow.calls}
        ends: dict[str, Any] = {}
        for name in self.workflow.order():
            mine = owner[name]
            end = self.scip.addVar(lb=0.0, ub=self.upper_s, name=f"end_{name}")
            self.scip.addCons(end >= self.of[mine, name])
            for other in ends:
                ways = [w for w, home in zip(self.way, self.ways, strict=True) if self._waits(home, owner, other, name)]
                if len(ways) == len(self.ways):
                    self.scip.addCons(end >= ends[other] + self.of[mine, name])
                elif ways:
                    slack = self.upper_s * (1 - self.sum(ways))
                    self.scip.addCons(end >= ends[other] + self.of[mine, name] - slack)
            ends[name] = end
        step = self.scip.addVar(lb=0.0, ub=self.upper_s, name="step")
        for end in ends.values():
            self.scip.addCons(step >= end + self.sum(self.of[ms, "sync"] for ms in self.workflow.model_stages))
        self.scip.setObjective(step)

    def _waits(self, home: Home, owner: Mapping[str, ModelStage], other: str, name: str) -> bool:
        its, mine = owner[other], owner[name]
        if (other, name) in data_edges(self.workflow):
            return True
        return home[its] == home[mine] if its.stage is mine.stage else home[its][0] == home[mine][0]

    def _limits(self, home: Home, used: Any) -> None:
        """Slots and bytes of one way to share the pool, as shares of what there is."""
        free = len(home) * (1 - used)
        by_partition: list[list[list[list[ModelStage]]]] = []
        for partition in sorted({p for p, _ in home.values()}):
            inside = [ms for ms in home if home[ms][0] == partition]
            stages = []
            for stage in {ms.stage for ms in inside}:
                groups: dict[int, list[ModelStage]] = {}
                for ms in inside:
                    if ms.stage is stage:
                        groups.setdefault(home[ms][1], []).append(ms)
                stages.append(list(groups.values()))
            by_partition.append(stages)
            for groups_taken in product(*stages):
                stored = self.sum(self.of[ms, "resident"] for group in groups_taken for ms in group)
                for ms in inside:
                    self.scip.addCons(stored + self.of[ms, "transient"] <= 1 + free)
        for stage_taken in product(*by_partition):
            for together in product(*(group for stage in stage_taken for group in stage)):
                self.scip.addCons(self.sum(self.of[ms, "slots"] for ms in together) <= 1 + free)


def columns_of(
    tables: Mapping[ModelStage, Any], calls: Mapping[ModelStage, Sequence[str]]
) -> dict[ModelStage, Columns]:
    """Columns of the planner's tables, whose calls have these names."""
    return {
        ms: Columns(
            dict(zip(calls[ms], table.calls, strict=True)), table.sync, table.slots, table.resident, table.transient
        )
        for ms, table in tables.items()
    }
