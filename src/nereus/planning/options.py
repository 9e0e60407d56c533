"""The candidates of a model-stage inside a window of devices, placed and priced, without the dominated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nereus.core import Assignment, Candidate, ModelStage
from nereus.cost.schedule import mask
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


class Choices:
    """Rows to choose one from: seconds of each call of a model-stage, bytes on each device of the pool, devices."""

    def __init__(self, seconds: Array, stored: Array, added: Array, devices: Sequence[int]) -> None:
        self.seconds = seconds
        self.stored = stored
        self.added = added
        self.devices = devices
        """As bits of pool indices."""

    @cached_property
    def least_seconds(self) -> list[float]:
        """No row is faster, call by call."""
        return [float(seconds) for seconds in self.seconds.min(axis=0)]

    @cached_property
    def least_stored(self) -> Array:
        """No row stores less, device by device."""
        return np.asarray(self.stored.min(axis=0))

    @cached_property
    def least_added(self) -> Array:
        """No row adds less, device by device."""
        return np.asarray(self.added.min(axis=0))

    @cached_property
    def core(self) -> int:
        """Devices that every row uses."""
        core = -1
        for devices in self.devices:
            core &= devices
        return core


@dataclass(frozen=True, slots=True)
class Group:
    """Assignments that differ in micro-batch, recomputation or KV budget alone, and their rows."""

    assignments: tuple[Assignment, ...]
    rows: Choices


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a model-stage in a window: `choices` has one row for each group, the best of its members."""

    groups: tuple[Group, ...]
    choices: Choices


class OptionTable:
    """Makes and remembers the options of every model-stage and window."""

    def __init__(self, problem: Problem, model: StepModel, pool: Window) -> None:
        self.problem = problem
        self.model = model
        self.pool = pool
        self.refusals = Refusals()
        self.usable = np.array([problem.usable_bytes(device) for device in pool], dtype=np.float64)
        self._index = {device: index for index, device in enumerate(pool)}
        self._frontiers: dict[tuple[ModelStage, tuple[tuple[str, int], ...]], tuple[Option, ...]] = {}
        self._options: dict[tuple[ModelStage, Window, bool], Options | None] = {}

    def options(self, model_stage: ModelStage, window: Window, fitting: bool = True) -> Options | None:
        """The options in `window`; with `fitting`, those that fit on empty devices. None when there are none."""
        key = (model_stage, window, fitting)
        if key not in self._options:
            self._options[key] = self._named(self.frontier(model_stage, window), window, fitting)
        return self._options[key]

    def frontier(self, model_stage: ModelStage, window: Window) -> tuple[Option, ...]:
        """Options that no other with the same layout and replicas beats in seconds and in bytes on every device.

        Where all devices are alike, the frontier of the whole pool serves smaller windows.
        """
        devices = [self.problem.cluster.device(device) for device in window]
        first: dict[int, int] = {}
        signature = tuple((device.kind, first.setdefault(device.node, len(first))) for device in devices)
        key = (model_stage, signature)
        if key not in self._frontiers:
            alike = len({(d.kind, d.node) for d in self.problem.cluster.devices}) == 1
            if alike and len(window) < len(self.pool):
                wider = self.frontier(model_stage, self.pool)
                self._frontiers[key] = tuple(option for option in wider if option.reach <= len(window))
            else:
                self._frontiers[key] = self._undominated(self._priced(model_stage, window))
        return self._frontiers[key]

    def _undominated(self, options: list[Option]) -> tuple[Option, ...]:
        kept: dict[Units, list[Option]] = {}
        options.sort(key=lambda option: (sum(option.seconds), sum(option.added)))
        for option in options:
            rivals = kept.setdefault(option.units, [])
            if any(_dominates(rival, option) for rival in rivals):
                self.refusals.add(option.candidate, "another micro-batch or recompute mode is as fast with less memory")
            else:
                rivals.append(option)
        return tuple(option for rivals in kept.values() for option in rivals)

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

    def _named(self, frontier: tuple[Option, ...], window: Window, fitting: bool) -> Options | None:
        groups: dict[Units, list[Option]] = {}
        limits = [float(self.usable[self._index[device]]) for device in window]
        for option in frontier:
            used = map(sum, zip(option.stored, option.added, strict=True))
            if fitting and any(size > limit for size, limit in zip(used, limits, strict=False)):
                self.refusals.add(option.candidate, "does not fit in memory, even alone")
            else:
                groups.setdefault(option.units, []).append(option)
        if not groups:
            return None
        named = tuple(self._group(options, window) for options in groups.values())
        best = Choices(
            np.array([group.rows.least_seconds for group in named]),
            np.array([group.rows.least_stored for group in named]),
            np.array([group.rows.least_added for group in named]),
            [group.rows.core for group in named],
        )
        return Options(named, best)

    def _group(self, options: list[Option], window: Window) -> Group:
        columns = [self._index[device] for device in window]
        stored = np.zeros((len(options), len(self.pool)))
        added = np.zeros_like(stored)
        for row, option in enumerate(options):
            stored[row, columns] = option.stored[: len(window)]
            added[row, columns] = option.added[: len(window)]
        units = _on(options[0].units, window)
        bits = mask(self._index[device] for unit in units for device in unit)
        seconds = np.array([option.seconds for option in options])
        assignments = tuple(Assignment(option.candidate, units) for option in options)
        return Group(assignments, Choices(seconds, stored, added, [bits] * len(options)))


def _dominates(one: Option, other: Option) -> bool:
    """Whether `one`, on the same devices, is never slower and never needs more (a hair of rounding apart)."""
    return all(a <= b * (1 + 1e-12) for a, b in zip(one.seconds, other.seconds, strict=True)) and all(
        a <= b for a, b in zip(one.added, other.added, strict=True)
    )


def _on(units: Units, window: Window) -> Units:
    return tuple(tuple(window[index] for index in unit) for unit in units)
