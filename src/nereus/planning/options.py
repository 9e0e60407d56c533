"""The candidates of a model-stage inside a window of devices, placed and priced, without the dominated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nereus.core import Assignment, Candidate, Layout, ModelStage
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
    def group(self) -> tuple[Layout, Units]:
        """What options share that differ in micro-batch, recompute or KV budget alone."""
        return (self.candidate.layout, self.units)

    @property
    def reach(self) -> int:
        """Devices of the window it needs."""
        return 1 + max(device for unit in self.units for device in unit)


class Options:
    """The options of a model-stage in a window, in groups that differ in micro-batch, recompute or KV budget alone.

    Rows of `assignments`, `seconds` (by call) and `added` (bytes by pool device) are options; rows of `stored` (bytes
    by pool device) and entries of `devices` (bits of pool indices) are groups, in whose order the options lie.
    """

    def __init__(self, groups: Sequence[Sequence[Option]], window: Window, columns: Sequence[int], width: int) -> None:
        count = sum(map(len, groups))
        self.assignments: list[Assignment] = []
        self.added = np.zeros((count, width))
        self.stored = np.zeros((len(groups), width))
        self.devices: list[int] = []
        for index, group in enumerate(groups):
            self.stored[index, columns] = group[0].stored[: len(window)]
            self.devices.append(mask(columns[device] for unit in group[0].units for device in unit))
            units = _on(group[0].units, window)
            for option in group:
                self.added[len(self.assignments), columns] = option.added[: len(window)]
                self.assignments.append(Assignment(option.candidate, units))
        self.seconds = np.array([option.seconds for group in groups for option in group])
        sizes = [len(group) for group in groups]
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.stops = np.cumsum(sizes)
        self._group_of = np.repeat(np.arange(len(groups)), sizes)
        self.least_stored = self.stored.min(axis=0)
        self.least_added = np.minimum.reduceat(self.added, self.starts, axis=0)
        """By group: what its leanest member adds, device by device."""

    @cached_property
    def core(self) -> int:
        """Devices that every option uses."""
        core = -1
        for devices in self.devices:
            core &= devices
        return core

    @cached_property
    def least_seconds(self) -> Array:
        """No option is faster, call by call."""
        return np.asarray(self.seconds.min(axis=0))

    def fastest(self, room: Array) -> Array:
        """By group and call: seconds of the fastest member that adds no more than the group's `room`; else infinite."""
        fits = np.all(self.added <= room[self._group_of], axis=1)
        seconds = np.where(fits.reshape(-1, 1), self.seconds, np.inf)
        return np.asarray(np.minimum.reduceat(seconds, self.starts, axis=0))

    def members(self, group: int, room: Array) -> NDArray[np.intp]:
        """The options of a group that add no more than `room`."""
        start, stop = self.starts[group], self.stops[group]
        return np.asarray(start + np.flatnonzero(np.all(self.added[start:stop] <= room, axis=1)))


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
        kept: dict[tuple[Layout, Units], list[Option]] = {}
        options.sort(key=lambda option: (sum(option.seconds), sum(option.added)))
        for option in options:
            rivals = kept.setdefault(option.group, [])
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
            placed = Assignment(candidate, _on(units, window))
            costs = self.model.costs(placed)
            stored, added = self._bytes(placed, units, len(window))
            found.append(Option(candidate, units, tuple(costs[c].seconds for c in calls), stored, added))
        return found

    def _bytes(self, placed: Assignment, units: Units, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        footprints, tp = self.model.footprints(placed), placed.candidate.layout.tp
        stored, added = [0] * width, [0] * width
        for unit in units:
            for position, index in enumerate(unit):
                each = footprints[position // tp]
                stored[index], added[index] = each.resident_bytes, each.bytes - each.resident_bytes
        return tuple(stored), tuple(added)

    def _named(self, frontier: tuple[Option, ...], window: Window, fitting: bool) -> Options | None:
        groups: dict[tuple[Layout, Units], list[Option]] = {}
        limits = [float(self.usable[self._index[device]]) for device in window]
        for option in frontier:
            used = map(sum, zip(option.stored, option.added, strict=True))
            if fitting and any(size > limit for size, limit in zip(used, limits, strict=False)):
                self.refusals.add(option.candidate, "does not fit in memory, even alone")
            else:
                groups.setdefault(option.group, []).append(option)
        if not groups:
            return None
        columns = [self._index[device] for device in window]
        return Options(list(groups.values()), window, columns, len(self.pool))


def _dominates(one: Option, other: Option) -> bool:
    """Whether `one`, on the same devices, is never slower and never needs more (a hair of rounding apart)."""
    return all(a <= b * (1 + 1e-12) for a, b in zip(one.seconds, other.seconds, strict=True)) and all(
        a <= b for a, b in zip(one.added, other.added, strict=True)
    )


def _on(units: Units, window: Window) -> Units:
    return tuple(tuple(window[index] for index in unit) for unit in units)
