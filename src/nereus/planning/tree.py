"""One arrangement as a tree: a level for each model-stage, a branch for each group of its options.

What a device stores follows from the groups alone, so once these are chosen every model-stage picks its member by
itself: the fastest whose transient bytes fit beside all that is stored. Before, the same with the least that the rest
can store is a lower bound on time; the bounds of all branches of a node are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nereus.core import ModelStage
from nereus.cost.schedule import SYNC, timeline, turns
from nereus.cost.step import StepModel
from nereus.planning.options import Array, Options


@dataclass(frozen=True, slots=True)
class Job:
    """What all trees of a search share: the calls of each level, and how many levels synchronise weights."""

    model: StepModel
    levels: tuple[ModelStage, ...]
    calls: tuple[tuple[str, ...], ...]
    synced: int

    @classmethod
    def of(cls, model: StepModel) -> Job:
        """Model-stages of a weight synchronisation come first, so that its time is known early."""
        workflow = model.workflow
        synced = tuple(dict.fromkeys(model_stage for pair in workflow.weight_syncs for model_stage in pair))
        levels = tuple(dict.fromkeys((*synced, *workflow.model_stages)))
        calls = tuple(tuple(call.name for call in workflow.calls_of(model_stage)) for model_stage in levels)
        return cls(model, levels, calls, len(synced))


@dataclass(frozen=True, slots=True)
class Node:
    """Groups chosen so far and what they store; `seconds` has a lower bound for every call."""

    groups: tuple[int, ...]
    stored: Array
    seconds: Mapping[str, float]


class Tree:
    """All choices of one group per level that fit within `usable` bytes of each pool device."""

    def __init__(self, job: Job, options: Sequence[Options], usable: Array) -> None:
        self.job = job
        self.options = tuple(options)
        self.usable = usable
        self.waits = self._turns([entry.core for entry in options])
        self.least_seconds = {SYNC: 0.0}
        for names, entry in zip(job.calls, options, strict=True):
            self.least_seconds.update(zip(names, map(float, entry.least_seconds), strict=True))

    def bound_s(self) -> float:
        """No choice gives a shorter step."""
        return self.step_s(self.waits, self.least_seconds)

    def tighten(self) -> None:
        """Raise the bound by what cannot fit even beside the least that the other levels store."""
        everything = np.sum([entry.least_stored for entry in self.options], axis=0)
        for names, entry in zip(self.job.calls, self.options, strict=True):
            room = self.usable - (everything - entry.least_stored) - entry.stored
            self.least_seconds.update(zip(names, map(float, entry.fastest(room).min(axis=0)), strict=True))

    def leaves(self, cutoff_s: Callable[[], float], sync_s: Callable[[Sequence[int]], float]) -> Iterator[Node]:
        """Complete choices that fit and whose bound is below the cutoff, most promising first."""
        yield from self._branch(Node((), np.zeros(len(self.usable)), self.least_seconds), cutoff_s, sync_s)

    def peaks(self, level: int, stored: Array, added: Array) -> Array:
        """The least peak of every device for each group of `level`, given what earlier levels store and add."""
        entry, (rest_stored, rest_added) = self.options[level], self._rest[level]
        return np.asarray(
            stored + entry.stored + rest_stored + np.maximum(np.maximum(added, entry.least_added), rest_added)
        )

    def exact_waits(self, groups: Sequence[int]) -> dict[str, tuple[str, ...]]:
        """What each call waits for when these groups are chosen."""
        return self._turns([entry.devices[group] for entry, group in zip(self.options, groups, strict=True)])

    def step_s(self, waits: Mapping[str, Sequence[str]], seconds: Mapping[str, float]) -> float:
        """The longest path when calls take `seconds`."""
        return timeline(self.job.model.order, waits, seconds).step_s

    def _branch(
        self, node: Node, cutoff_s: Callable[[], float], sync_s: Callable[[Sequence[int]], float]
    ) -> Iterator[Node]:
        level = len(node.groups)
        entry, (rest_stored, rest_added) = self.options[level], self._rest[level]
        room = self.usable - node.stored - entry.stored - rest_stored
        fits = np.all(rest_added <= room, axis=1).reshape(-1, 1)
        fastest = np.where(fits, entry.fastest(room), np.inf)
        bounds = self._bounds_s({**node.seconds, **dict(zip(self.job.calls[level], fastest.T, strict=True))})
        for group in map(int, np.argsort(bounds, kind="stable")):
            if bounds[group] >= cutoff_s():
                return
            child = self._child(node, group, room[group], fastest[group], sync_s)
            if child is None:
                continue
            if level + 1 == len(self.options):
                if self.step_s(self.exact_waits(child.groups), child.seconds) < cutoff_s():
                    yield child
            elif self.step_s(self.waits, child.seconds) < cutoff_s():
                yield from self._branch(child, cutoff_s, sync_s)

    def _child(
        self, node: Node, group: int, room: Array, fastest: Array, sync_s: Callable[[Sequence[int]], float]
    ) -> Node | None:
        """The node below, with the times of earlier levels in the room that is left; None when they do not fit."""
        level = len(node.groups)
        seconds = {**node.seconds, **dict(zip(self.job.calls[level], map(float, fastest), strict=True))}
        for above, chosen in enumerate(node.groups):
            entry = self.options[above]
            members = entry.members(chosen, room)
            if not len(members):
                return None
            times = entry.seconds[members].min(axis=0)
            seconds.update(zip(self.job.calls[above], map(float, times), strict=True))
        groups = (*node.groups, group)
        if len(groups) == self.job.synced:
            seconds[SYNC] = sync_s(groups)
        return Node(groups, node.stored + self.options[level].stored[group], seconds)

    def _bounds_s(self, seconds: Mapping[str, float | Array]) -> Array:
        """The longest path for all branches of a node at once."""
        ends: dict[str, float | Array] = {}
        last: float | Array = 0.0
        for name in self.job.model.order:
            start: float | Array = 0.0
            for other in self.waits[name]:
                start = np.maximum(start, ends[other])
            ends[name] = start + seconds[name]
            last = np.maximum(last, ends[name])
        return np.asarray(last)

    def _turns(self, devices: Sequence[int]) -> dict[str, tuple[str, ...]]:
        by_call = {name: bits for names, bits in zip(self.job.calls, devices, strict=True) for name in names}
        by_call[SYNC] = 0
        for bits in devices[: self.job.synced]:
            by_call[SYNC] |= bits
        return turns(self.job.model.order, self.job.model.before, by_call)

    @cached_property
    def _rest(self) -> list[tuple[Array, Array]]:
        """By level: bytes that later levels store at least, and the least that their calls add."""
        width = len(self.usable)
        rest = [(np.zeros(width), np.zeros(width))]
        for entry in reversed(self.options[1:]):
            stored, added = rest[-1]
            rest.append((stored + entry.least_stored, np.maximum(added, entry.least_added.min(axis=0))))
        return rest[::-1]
