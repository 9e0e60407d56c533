"""One arrangement as a tree: a level for each model-stage, a branch for each of its options, bounds as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nereus.core import Assignment, ModelStage, Plan
from nereus.cost.schedule import SYNC, turns
from nereus.cost.step import StepModel
from nereus.planning.arrange import Arrangement
from nereus.planning.options import Array, Options

Seconds = Mapping[str, float | Array]


class Tree:
    """`levels` are the model-stages in the order they are chosen; the arrays are over options and pool devices."""

    def __init__(
        self, model: StepModel, arrangement: Arrangement, levels: Sequence[ModelStage], options: Sequence[Options]
    ) -> None:
        self.model = model
        self.arrangement = arrangement
        self.levels = tuple(levels)
        self.options = tuple(options)
        workflow = model.workflow
        self.calls = [[call.name for call in workflow.calls_of(model_stage)] for model_stage in levels]
        cores = {call: entry.core for calls, entry in zip(self.calls, options, strict=True) for call in calls}
        synced = {model_stage for pair in workflow.weight_syncs for model_stage in pair}
        cores[SYNC] = frozenset[int]().union(*(o.core for ms, o in zip(levels, options, strict=True) if ms in synced))
        self.waits = turns(model.order, model.before, cores)
        self.least_seconds: dict[str, float | Array] = {
            call: float(entry.seconds[:, column].min())
            for calls, entry in zip(self.calls, options, strict=True)
            for column, call in enumerate(calls)
        }
        if workflow.weight_syncs:
            self.least_seconds[SYNC] = 0.0
        self.least_stored, self.least_added = self._least()

    def _least(self) -> tuple[list[Array], list[Array]]:
        """By level: bytes that it and all later levels store at least, and the least that their largest call adds."""
        width = self.options[0].stored.shape[1]
        stored, added = [np.zeros(width)], [np.zeros(width)]
        for entry in reversed(self.options):
            stored.append(stored[-1] + entry.stored.min(axis=0))
            added.append(np.maximum(added[-1], entry.added.min(axis=0)))
        return stored[::-1], added[::-1]

    def bound_s(self, seconds: Seconds) -> float | Array:
        """The longest path when calls take `seconds`, with the turns that every choice of options implies."""
        ends: dict[str, float | Array] = {}
        last: float | Array = 0.0
        for name in self.model.order:
            start: float | Array = 0.0
            for other in self.waits[name]:
                start = np.maximum(start, ends[other])
            ends[name] = start + seconds[name]
            last = np.maximum(last, ends[name])
        return last

    def bytes(self, level: int, stored: Array, added: Array) -> Array:
        """The least peak of every pool device for each option of `level`, given what earlier levels use."""
        entry = self.options[level]
        largest = np.maximum(np.maximum(added, entry.added), self.least_added[level + 1])
        return np.asarray(stored + entry.stored + self.least_stored[level + 1] + largest)

    def bounds_s(self, level: int, rows: NDArray[np.intp], seconds: Seconds) -> Array:
        """The least step time for each of the options `rows` of `level`; `seconds` holds all other calls."""
        entry = self.options[level]
        columns = {call: entry.seconds[rows, column] for column, call in enumerate(self.calls[level])}
        return np.broadcast_to(np.asarray(self.bound_s({**seconds, **columns})), (len(rows),))

    def plan(self, chosen: Sequence[int]) -> Plan:
        """The plan of one option per level."""
        found = self.assignments(chosen)
        return Plan(tuple(sorted(found, key=lambda a: a.candidate.model_stage.sort_key)), self.arrangement.partitions)

    def assignments(self, chosen: Sequence[int]) -> tuple[Assignment, ...]:
        """The assignments of the levels chosen so far."""
        return tuple(self.options[level].assignments[row] for level, row in enumerate(chosen))

    def sync_s(self, chosen: Sequence[int]) -> float | None:
        """Seconds of the weight synchronisation once all its model-stages are chosen."""
        placed = {a.candidate.model_stage: a for a in self.assignments(chosen)}
        pairs = self.model.workflow.weight_syncs
        if not pairs or not all(model_stage in placed for pair in pairs for model_stage in pair):
            return None
        return self.model.sync_cost([(placed[source], placed[target]) for source, target in pairs]).seconds

    def step_s(self, chosen: Sequence[int], seconds: Mapping[str, float]) -> float:
        """The step time of a complete choice, with the turns of its real devices."""
        devices = {
            call: assignment.devices
            for calls, assignment in zip(self.calls, self.assignments(chosen), strict=True)
            for call in calls
        }
        synced = {model_stage for pair in self.model.workflow.weight_syncs for model_stage in pair}
        devices[SYNC] = frozenset[int]().union(
            *(a.devices for a in self.assignments(chosen) if a.candidate.model_stage in synced)
        )
        return self.model.line(devices, seconds).step_s
