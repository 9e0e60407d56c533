"""The candidates of a model-stage inside a window of devices, placed and priced, without the dominated ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus.core import Assignment, Candidate, ModelStage
from nereus.cost.step import StepModel
from nereus.planning.arrange import Window
from nereus.planning.legal import Refusals, legal
from nereus.planning.place import Units, place
from nereus.planning.problem import Problem

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Option:
    """A candidate at the front of a window; `units` and the byte vectors are by index into the window."""

    candidate: Candidate
    units: Units
    seconds: tuple[float, ...]
    stored: tuple[int, ...]
    added: tuple[int, ...]

    @property
    def reach(self) -> int:
        """Devices of the window it needs."""
        return 1 + max(device for unit in self.units for device in unit)


@dataclass(frozen=True, slots=True)
class Options:
    """Options on named devices. Rows are options; columns are the model-stage's calls, or the devices of the pool."""

    assignments: tuple[Assignment, ...]
    seconds: Array
    stored: Array
    added: Array
    core: frozenset[int]
    """Devices that every option uses."""

    def __len__(self) -> int:
        return len(self.assignments)


class OptionTable:
    """Makes and remembers the options of every model-stage and window."""

    def __init__(self, problem: Problem, model: StepModel, pool: Window) -> None:
        self.problem = problem
        self.model = model
        self.pool = pool
        self.refusals = Refusals()
        self._usable = np.array([problem.usable_bytes(device) for device in pool], dtype=np.float64)
        self._index = {device: index for index, device in enumerate(pool)}
        self._synced = {model_stage for pair in problem.workflow.weight_syncs for model_stage in pair}
        self._frontiers: dict[tuple[ModelStage, tuple[tuple[str, int], ...]], tuple[Option, ...]] = {}
        self._options: dict[tuple[ModelStage, Window, bool], Options] = {}

    def options(self, model_stage: ModelStage, window: Window, fitting: bool = True) -> Options:
        """The frontier in `window`, fastest first; with `fitting`, only options that fit on empty devices."""
        key = (model_stage, window, fitting)
        if key not in self._options:
            options = self._named(self.frontier(model_stage, window), window)
            if fitting:
                fits = ((options.stored + options.added) <= self._usable).all(axis=1)
                for index in np.flatnonzero(~fits):
                    self.refusals.add(options.assignments[index].candidate, "does not fit in memory")
                options = _pick(options, np.flatnonzero(fits))
            self._options[key] = options
        return self._options[key]

    def frontier(self, model_stage: ModelStage, window: Window) -> tuple[Option, ...]:
        """Options that no other beats in seconds and in bytes on every device at once.

        A dominating option uses no device that the dominated one does not, so one frontier serves smaller windows.
        """
        devices = [self.problem.cluster.device(device) for device in window]
        first = {node: index for index, node in reversed(list(enumerate(d.node for d in devices)))}
        signature = tuple((device.kind, first[device.node]) for device in devices)
        key = (model_stage, signature)
        if key not in self._frontiers:
            whole = tuple(device for device in self.pool if self.problem.cluster.device(device).node == devices[0].node)
            if len(set(signature)) == 1 and len(whole) > len(window) and self._uniform(whole):
                wider = self.frontier(model_stage, whole)
                self._frontiers[key] = tuple(option for option in wider if option.reach <= len(window))
            else:
                self._frontiers[key] = self._undominated(model_stage, window)
        return self._frontiers[key]

    def _uniform(self, window: Window) -> bool:
        return len({self.problem.cluster.device(device).kind for device in window}) == 1

    def _undominated(self, model_stage: ModelStage, window: Window) -> tuple[Option, ...]:
        options = self._priced(model_stage, window)
        options.sort(key=lambda option: (sum(option.seconds), sum(option.stored) + sum(option.added)))
        width = len(window)
        kept: list[Option] = []
        rows = np.empty((len(options), 2 * width + len(options[0].seconds) + 2)) if options else np.empty((0, 0))
        for option in options:
            row = self._features(option, width)
            if not (rows[: len(kept)] <= row + 1e-12 * np.abs(row)).all(axis=1).any():
                rows[len(kept)] = row
                kept.append(option)
            else:
                self.refusals.add(option.candidate, "another candidate is as fast with less memory")
        return tuple(kept)

    def _features(self, option: Option, width: int) -> Array:
        """What dominance compares. A weight synchronisation depends on both layouts, so these must be equal."""
        candidate, group = option.candidate, 0
        if candidate.model_stage in self._synced:
            group = (candidate.layout.tp << 20) + (candidate.layout.pp << 10) + candidate.dp
        pad = (0,) * (width - len(option.stored))
        return np.array([*option.seconds, *option.stored, *pad, *option.added, *pad, group, -group], dtype=np.float64)

    def _priced(self, model_stage: ModelStage, window: Window) -> list[Option]:
        nodes = [self.problem.cluster.device(device).node for device in window]
        calls = [call.name for call in self.problem.workflow.calls_of(model_stage)]
        found = []
        for candidate in legal(self.problem, model_stage, len(window), self.refusals):
            units = place(candidate.layout, candidate.dp, nodes)
            if units is None:
                self.refusals.add(candidate, "a TP group would leave its node")
                continue
            costs = self.model.costs(candidate, _on(units, window))
            stored, added = self._bytes(candidate, units, calls, len(window))
            found.append(Option(candidate, units, tuple(costs[c].seconds for c in calls), stored, added))
        return found

    def _bytes(
        self, candidate: Candidate, units: Units, calls: list[str], width: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        resident, tp = self.model.resident(candidate), candidate.layout.tp
        largest = [
            max(sum(self.model.transient(candidate, call, pp_rank).values()) for call in calls)
            for pp_rank in range(candidate.layout.pp)
        ]
        stored, added = [0] * width, [0] * width
        for unit in units:
            for position, index in enumerate(unit):
                stored[index] = resident[position]
                added[index] = largest[position // tp]
        return tuple(stored), tuple(added)

    def _named(self, frontier: tuple[Option, ...], window: Window) -> Options:
        columns = [self._index[device] for device in window]
        stored = np.zeros((len(frontier), len(self.pool)))
        added = np.zeros_like(stored)
        for row, option in enumerate(frontier):
            stored[row, columns] = option.stored[: len(window)]
            added[row, columns] = option.added[: len(window)]
        assignments = tuple(Assignment(option.candidate, _on(option.units, window)) for option in frontier)
        seconds = np.array([option.seconds for option in frontier]).reshape(len(frontier), -1)
        return Options(assignments, seconds, stored, added, _core(assignments))


def _on(units: Units, window: Window) -> Units:
    return tuple(tuple(window[index] for index in unit) for unit in units)


def _core(assignments: tuple[Assignment, ...]) -> frozenset[int]:
    devices = [assignment.devices for assignment in assignments]
    return frozenset.intersection(*devices) if devices else frozenset()


def _pick(options: Options, rows: NDArray[np.intp]) -> Options:
    assignments = tuple(options.assignments[row] for row in rows)
    return Options(assignments, options.seconds[rows], options.stored[rows], options.added[rows], _core(assignments))
