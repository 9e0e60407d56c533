"""Choosing one row per model-stage as a tree: a level for each, bounds on time and memory as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nereus.core import ModelStage
from nereus.cost.schedule import SYNC, turns
from nereus.cost.step import StepModel
from nereus.planning.options import Array, Choices

Value = float | Array
Sync = Callable[[Sequence[int]], float | None]
"""Seconds of the weight synchronisation for the rows chosen so far; None before they determine it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all trees of a search share: the calls of each level, and which levels synchronise weights."""

    model: StepModel
    levels: tuple[ModelStage, ...]
    calls: tuple[tuple[str, ...], ...]
    synced: tuple[int, ...]

    @classmethod
    def of(cls, model: StepModel) -> Job:
        """Model-stages of a weight synchronisation come first, so that its time is known early."""
        workflow = model.workflow
        synced = tuple(dict.fromkeys(model_stage for pair in workflow.weight_syncs for model_stage in pair))
        levels = tuple(dict.fromkeys((*synced, *workflow.model_stages)))
        calls = tuple(tuple(call.name for call in workflow.calls_of(model_stage)) for model_stage in levels)
        return cls(model, levels, calls, tuple(range(len(synced))))


@dataclass(frozen=True, slots=True)
class _Node:
    """Rows chosen so far and what they use of every pool device; `seconds` bounds the calls not chosen yet."""

    chosen: tuple[int, ...]
    stored: Array
    added: Array
    seconds: Mapping[str, Value]


class Tree:
    """One `Choices` for each level of a job."""

    def __init__(self, job: Job, choices: Sequence[Choices], sync_s: float = 0.0) -> None:
        self.job = job
        self.choices = tuple(choices)
        cores = {name: entry.core for names, entry in zip(job.calls, choices, strict=True) for name in names}
        cores[SYNC] = 0
        for level in job.synced:
            cores[SYNC] |= choices[level].core
        self.waits = turns(job.model.order, job.model.before, cores)
        self.least_seconds: dict[str, Value] = {SYNC: sync_s}
        for names, entry in zip(job.calls, choices, strict=True):
            self.least_seconds.update(zip(names, entry.least_seconds, strict=True))

    @property
    def bound_s(self) -> float:
        """No choice of rows gives a shorter step."""
        ends: dict[str, float] = {}
        for name in self.job.model.order:
            start = max((ends[other] for other in self.waits[name]), default=0.0)
            ends[name] = start + float(self.least_seconds[name])
        return max(ends.values())

    def completions(
        self, usable: Array, cutoff_s: Callable[[], float], sync: Sync
    ) -> Iterator[tuple[tuple[int, ...], float, float]]:
        """(rows, bound on the step, seconds of the synchronisation) of what fits and may beat the cutoff."""
        zeros = np.zeros(len(usable))
        yield from self._branch(_Node((), zeros, zeros, self.least_seconds), usable, cutoff_s, sync)

    def _branch(
        self, node: _Node, usable: Array, cutoff_s: Callable[[], float], sync: Sync
    ) -> Iterator[tuple[tuple[int, ...], float, float]]:
        level = len(node.chosen)
        entry, names = self.choices[level], self.job.calls[level]
        rows = np.flatnonzero((self.peaks(level, node.stored, node.added) <= usable).all(axis=1))
        columns = dict(zip(names, entry.seconds[rows].T, strict=True))
        bounds = np.broadcast_to(np.asarray(self._longest({**node.seconds, **columns})), (len(rows),))
        for index in np.argsort(bounds, kind="stable"):
            if bounds[index] >= cutoff_s():
                return
            row = int(rows[index])
            chosen = (*node.chosen, row)
            seconds = {**node.seconds, **dict(zip(names, map(float, entry.seconds[row]), strict=True))}
            found = sync(chosen)
            if found is not None:
                seconds[SYNC] = found
            if level + 1 == len(self.choices):
                yield chosen, float(self._longest(seconds)), float(seconds[SYNC])
            else:
                added = np.maximum(node.added, entry.added[row])
                child = _Node(chosen, node.stored + entry.stored[row], added, seconds)
                yield from self._branch(child, usable, cutoff_s, sync)

    def _longest(self, seconds: Mapping[str, Value]) -> Value:
        """The longest path when calls take `seconds`, with the turns that every choice of rows implies."""
        ends: dict[str, Value] = {}
        last: Value = 0.0
        for name in self.job.model.order:
            start: Value = 0.0
            for other in self.waits[name]:
                start = np.maximum(start, ends[other])
            ends[name] = start + seconds[name]
            last = np.maximum(last, ends[name])
        return last

    def peaks(self, level: int, stored: Array, added: Array) -> Array:
        """The least peak of every pool device for each row of `level`, given what earlier levels use."""
        entry, (least_stored, least_added) = self.choices[level], self._rest[level]
        return np.asarray(
            stored + entry.stored + least_stored + np.maximum(np.maximum(added, entry.added), least_added)
        )

    @cached_property
    def _rest(self) -> list[tuple[Array, Array]]:
        """By level: bytes that later levels store at least, and the least that their largest call adds."""
        width = self.choices[0].stored.shape[1]
        rest = [(np.zeros(width), np.zeros(width))]
        for entry in reversed(self.choices[1:]):
            stored, added = rest[-1]
            rest.append((stored + entry.least_stored, np.maximum(added, entry.least_added)))
        return rest[::-1]
