"""The order of a transition as a mixed-integer program for SCIP: when each commit group starts and what it reads.

Written apart from the scheduler, from its model (D6.4): groups that share a device follow one another; a group that may
read any whole unit has a binary for each; several may start together on a unit that has devices for all of them. An old
unit leaves when all that read it have ended and another is there. What a group allocates must fit with what has not
left. No group gives up what it would read in place, and nothing is staged. Times are in units of the longest group.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from nereus.core import EMU, ModelStage
from nereus.transition.decompose import LocalDAG

LARGEST = 60_000
"""Binaries, or constraints; what is larger is not built: writing it down would take longer than the limit."""


@dataclass(frozen=True)
class Answer:
    """What SCIP found and proved, in bytes (infinite, 0: nothing), and the CPU seconds it took."""

    status: str
    span_bytes: float
    bound_bytes: float
    solve_s: float
    binaries: int
    constraints: int


@dataclass(frozen=True, eq=False)
class Task:
    """A commit group. `reads` are old units, or nothing where any unit of the model-stage will do."""

    model_stage: ModelStage
    devices: frozenset[int]
    reads: tuple[EMU, ...]
    received: float
    moved: float
    wanted: Mapping[int, int]
    kept: Mapping[int, int]
    """Bytes by device that it takes over from what it reads in place."""


@dataclass(frozen=True, eq=False)
class Copy:
    """A unit that can be read: of the start, or made by a task."""

    devices: frozenset[int]
    maker: Task | None = None
    unit: EMU | None = None


class TooLargeError(Exception):
    """More than are worth writing down."""


def solve(
    locals_: Sequence[LocalDAG],
    used: Mapping[int, int],
    capacity: Mapping[int, int],
    horizon_bytes: float,
    limit_s: float,
) -> Answer:
    """The shortest order that ends by the horizon, as far as SCIP gets in `limit_s` of CPU time."""
    began_s = time.process_time()
    program = _Program(locals_, used, capacity, horizon_bytes)
    try:
        program.build()
    except TooLargeError:
        took_s = time.process_time() - began_s
        return Answer("not built", float("inf"), 0.0, took_s, program.binaries, program.constraints)
    scip = program.scip
    scip.setParam("timing/clocktype", 1)  # CPU time, so that a busy machine takes nothing from it
    scip.setParam("limits/time", max(0.1, limit_s - (time.process_time() - began_s)))
    scip.optimize()
    span = float(scip.getObjVal()) * program.unit if scip.getNSols() else float("inf")
    bound = max(float(scip.getDualbound()), 0.0) * program.unit if scip.getStatus() != "infeasible" else float("inf")
    took_s = time.process_time() - began_s
    return Answer(scip.getStatus(), span, bound, took_s, program.binaries, program.constraints)


class _Program:
    def __init__(
        self, locals_: Sequence[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int], horizon_bytes: float
    ) -> None:
        from pyscipopt import Model, quicksum

        self.scip: Any = Model()
        self.scip.hideOutput()
        self.sum = quicksum
        self.unit = max([1.0, *(float(build.received_bytes) for local in locals_ for build in local.builds)])
        self.horizon = horizon_bytes / self.unit
        self.used, self.capacity = used, capacity
        self.binaries = self.constraints = 0
        self.tasks = [task for local in locals_ for task in self._tasks(local)]
        self.copies = {local.model_stage: self._copies(local) for local in locals_}
        self.leaving = {unit: local.pricing.stored(unit.layout) for local in locals_ for unit in local.left}
        self.kept = {local.model_stage for local in locals_ if local.kept}
        self.starts = [self._time() for _ in self.tasks]
        self.lasts: list[Any] = []
        self.chosen: list[dict[Copy, Any]] = []
        self.before: dict[tuple[int, int], Any] = {}
        self.joined: dict[tuple[int, int], Any] = {}

    def _tasks(self, local: LocalDAG) -> Iterable[Task]:
        for build in local.builds:
            sizes = build.received_bytes / self.unit, build.moved_bytes / self.unit
            yield Task(
                local.model_stage, frozenset(build.acquires), build.sources, *sizes, build.acquires, build.kept_bytes
            )

    def _copies(self, local: LocalDAG) -> list[Copy]:
        """What can be read of a model-stage."""
        found = [Copy(frozenset(unit.devices), None, unit) for unit in (*local.kept, *local.left)]
        made = {frozenset(build.acquires): build.goals for build in local.builds}
        for task in self.tasks:
            if task.model_stage == local.model_stage:
                found.extend(Copy(frozenset(goal.devices), task) for goal in made[task.devices])
        return found

    def build(self) -> None:
        """All constraints."""
        span = self._time()
        for index, task in enumerate(self.tasks):
            self.chosen.append(self._reads(task))
            self.lasts.append(self._duration(task, self.chosen[-1]))
            self._add(span >= self.starts[index] + self.lasts[index])
        number = {id(task): index for index, task in enumerate(self.tasks)}
        for index, chosen in enumerate(self.chosen):
            for copy, taken in chosen.items():
                if copy.maker is not None:
                    self._follows(index, number[id(copy.maker)], taken)
        for one, other in combinations(range(len(self.tasks)), 2):
            self._apart(one, other)
        for index in range(len(self.tasks)):
            self._share(index)
        left = self._releases()
        gone = {unit: self._leaves(unit, before) for unit, before in left.items()}
        for stage in {unit.model_stage for unit in gone} - self.kept:
            self._keeps_one(stage, gone)
        self.scip.setObjective(span)

    def _reads(self, task: Task) -> dict[Copy, Any]:
        """What may be read → whether it is; what is certain is 1."""
        if task.reads:
            return {copy: 1 for copy in self.copies[task.model_stage] if copy.unit in task.reads}
        chosen = {
            copy: self._binary()
            for copy in self.copies[task.model_stage]
            if copy.maker is not task and copy.devices.isdisjoint(task.devices)
        }
        self._add(self.sum(chosen.values()) >= 1)
        return chosen

    def _duration(self, task: Task, chosen: Mapping[Copy, Any]) -> Any:
        """The busiest device: moved / senders is convex, so tangents at whole numbers of senders are exact there."""
        if all(isinstance(taken, int) for taken in chosen.values()):
            senders = len(set[int]().union(*(copy.devices for copy in chosen)))
            return max(task.received, task.moved / senders if senders else 0.0)
        least = min(len(copy.devices) for copy in chosen)
        if task.moved <= task.received * least:
            return task.received
        lasts = self.scip.addVar(lb=task.received, ub=task.moved / least)
        senders = self.sum(len(copy.devices) * taken for copy, taken in chosen.items())
        at = float(least)
        while task.moved > task.received * at:
            self._add(lasts >= task.moved / at * (2 - senders / at))
            at += 1
        return lasts

    def _follows(self, later: int, earlier: int, sure: Any) -> None:
        """`later` starts when `earlier` has ended, if `sure` is 1."""
        end = self.starts[earlier] + self.lasts[earlier]
        self._add(self.starts[later] >= end - 2 * self.horizon * (1 - sure))

    def _apart(self, one: int, other: int) -> None:
        """Groups that share a device follow one another; those that read one unit may start together."""
        first, second = self.tasks[one], self.tasks[other]
        reads = self.chosen[one], self.chosen[other]
        if not _certain(first, reads[0]).isdisjoint(_certain(second, reads[1])):
            self._add(self._order(one, other) + self._order(other, one) >= 1)
            return
        for mine, taken in reads[0].items():
            if not mine.devices.isdisjoint(_certain(second, reads[1])):
                self._add(self._order(one, other) + self._order(other, one) >= taken)
        for its, taken in reads[1].items():
            if not its.devices.isdisjoint(_certain(first, reads[0])):
                self._add(self._order(one, other) + self._order(other, one) >= taken)
        for mine, taken in reads[0].items():
            for its, also in reads[1].items():
                if mine.devices.isdisjoint(its.devices) or isinstance(taken, int) or isinstance(also, int):
                    continue
                order = self._order(one, other) + self._order(other, one)
                if mine is its and len(mine.devices) >= len(first.devices) + len(second.devices):
                    order = order + self._together(one, other)
                self._add(order >= taken + also - 1)

    def _order(self, earlier: int, later: int) -> Any:
        """Whether `earlier` ends before `later` starts, for sure."""
        if (earlier, later) not in self.before:
            self.before[earlier, later] = self._binary()
            self._follows(later, earlier, self.before[earlier, later])
        return self.before[earlier, later]

    def _together(self, one: int, other: int) -> Any:
        """Whether two start at once on a unit. It has devices for as many as fit."""
        if (one, other) not in self.joined:
            joined = self.joined[one, other] = self._binary()
            for a, b in ((one, other), (other, one)):
                self._add(self.starts[a] >= self.starts[b] - self.horizon * (1 - joined))
        return self.joined[one, other]

    def _releases(self) -> dict[EMU, dict[int, Any]]:
        """Old unit → task → whether the unit has left before, from what memory needs."""
        found: dict[EMU, dict[int, Any]] = {}
        most = dict(self.used)
        for task in self.tasks:
            for device, wanted in task.wanted.items():
                most[device] = most.get(device, 0) + wanted
        for index, task in enumerate(self.tasks):
            for device, wanted in task.wanted.items():
                if wanted and device in self.capacity and most[device] > self.capacity[device]:
                    self._room(index, device, found)
        return found

    def _room(self, index: int, device: int, found: dict[EMU, dict[int, Any]]) -> None:
        """What is there when the task starts."""
        level: Any = self.used.get(device, 0) + self.tasks[index].wanted[device]
        for other, task in enumerate(self.tasks):
            if other != index and task.wanted.get(device):
                level = level + task.wanted[device] * self._order(other, index)
        for unit, stored in self.leaving.items():
            if device in unit.devices:
                left = found.setdefault(unit, {})
                if index not in left:
                    left[index] = self._binary()
                freed = stored[unit.devices.index(device)] - self._taken_over(unit, device)
                level = level - freed * left[index]
        self._add(level / self.capacity[device] <= 1)

    def _taken_over(self, unit: EMU, device: int) -> int:
        """Bytes of an old unit that a goal unit built from it keeps on a device."""
        return sum(task.kept.get(device, 0) for task in self.tasks if unit in task.reads)

    def _leaves(self, unit: EMU, before: Mapping[int, Any]) -> Any:
        """When an old unit leaves: after all that read it, and before the tasks that it makes room for."""
        gone = self._time()
        for index, chosen in enumerate(self.chosen):
            for copy, taken in chosen.items():
                if copy.unit == unit:
                    self._add(gone >= self.starts[index] + self.lasts[index] - 2 * self.horizon * (1 - taken))
                    if index in before:  # also where nothing is received and the task takes no time
                        self._add(before[index] + taken <= 1)
        for index, sure in before.items():
            self._add(self.starts[index] >= gone - self.horizon * (1 - sure))
        return gone

    def _keeps_one(self, stage: ModelStage, gone: Mapping[EMU, Any]) -> None:
        """Of a model-stage that keeps no unit, one old unit stays until a task has ended."""
        olds = [unit for unit in self.leaving if unit.model_stage == stage]
        if not gone.keys() >= set(olds):
            return
        committed, last, first = self._time(), [self._binary() for _ in olds], list[Any]()
        for index, task in enumerate(self.tasks):
            if task.model_stage == stage:
                first.append(self._binary())
                end = self.starts[index] + self.lasts[index]
                self._add(committed >= end - 2 * self.horizon * (1 - first[-1]))
        self._add(self.sum(first) >= 1)
        self._add(self.sum(last) >= 1)
        for unit, stays in zip(olds, last, strict=True):
            self._add(gone[unit] >= committed - self.horizon * (1 - stays))

    def _share(self, index: int) -> None:
        """Those that start together with a task fit on a unit that all of them read."""
        mine = [(pair, joined) for pair, joined in self.joined.items() if index in pair]
        if mine:
            largest = max(len(copy.devices) for copy in self.chosen[index])
            others = self.sum(len(self.tasks[sum(pair) - index].devices) * joined for pair, joined in mine)
            self._add(others <= largest - len(self.tasks[index].devices))

    def _time(self) -> Any:
        return self.scip.addVar(lb=0.0, ub=self.horizon)

    def _binary(self) -> Any:
        self.binaries += 1
        if self.binaries > LARGEST:
            raise TooLargeError
        return self.scip.addVar(vtype="B")

    def _add(self, constraint: Any) -> None:
        self.constraints += 1
        if self.constraints > LARGEST:
            raise TooLargeError
        self.scip.addCons(constraint)


def _certain(task: Task, chosen: Mapping[Copy, Any]) -> frozenset[int]:
    """Devices that a task occupies whatever is chosen."""
    sure = (copy.devices for copy, taken in chosen.items() if isinstance(taken, int))
    return task.devices.union(*sure)
