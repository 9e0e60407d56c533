"""One global order for the local DAGs, with RESOURCE edges where memory is short (paper §6.1, D6.4)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nereus.core import (
    Destroy,
    Edge,
    EdgeKind,
    EMUSet,
    InfeasibleError,
    ModelStage,
    Primitive,
    StateSchema,
    TransitionDAG,
)
from nereus.transition.decompose import LocalDAG
from nereus.transition.fit import stored_bytes


class BlockedError(InfeasibleError):
    """No order exists: `waiting` are the steps that remain, none of which can start."""

    def __init__(self, message: str, short_bytes: Mapping[int, int], waiting: tuple[Primitive, ...]) -> None:
        super().__init__(message, short_bytes)
        self.waiting = waiting


@dataclass(slots=True)
class _Item:
    """What is ordered: a commit group or one Destroy."""

    steps: tuple[Primitive, ...]
    before: set[int] = field(default_factory=set)
    """Indices of the items it waits for directly."""

    @property
    def releases(self) -> bool:
        return isinstance(self.steps[0], Destroy)

    @property
    def stage_order(self) -> tuple[int, str]:
        return self.steps[0].model_stage.sort_key

    @property
    def acquires(self) -> Counter[int]:
        total: Counter[int] = Counter()
        for step in self.steps:
            total.update(step.acquires)
        return total


def schedule(
    start: EMUSet,
    goal: EMUSet,
    locals_: Sequence[LocalDAG],
    schemas: Mapping[ModelStage, StateSchema],
    capacity: Mapping[int, int],
    other_bytes: Mapping[int, int] | None = None,
) -> TransitionDAG:
    """The global DAG, its primitives in execution order: release before acquire, then stage order.

    Memory is `capacity` less `other_bytes`; a device that `capacity` leaves out has no limit. An acquisition that
    fits only after a Destroy gets an edge from it. When stage order ends in a dead end, groups that free the most on
    commit go first. Raises BlockedError when neither order works.
    """
    items = _items(locals_)
    edges = tuple(edge for local in locals_ for edge in local.edges)
    used = stored_bytes(start, schemas, other_bytes)
    by_stage = sorted(range(len(items)), key=lambda index: (items[index].stage_order, index))
    try:
        order, more = _Run(items, used, capacity, by_stage).order()
    except BlockedError:
        freed = _freed(items)
        by_gain = sorted(by_stage, key=lambda index: -freed[index])
        order, more = _Run(items, used, capacity, by_gain).order()
    steps = tuple(step for index in order for step in items[index].steps)
    return TransitionDAG(start, goal, steps, (*edges, *more))


def _items(locals_: Iterable[LocalDAG]) -> list[_Item]:
    items: list[_Item] = []
    edges: list[Edge] = []
    for local in locals_:
        items.extend(_Item(group) for group in local.groups)
        items.extend(_Item((destroy,)) for destroy in local.destroys)
        edges.extend(local.edges)
    owner = {step.id: index for index, item in enumerate(items) for step in item.steps}
    for edge in edges:
        if owner[edge.earlier] != owner[edge.later]:
            items[owner[edge.later]].before.add(owner[edge.earlier])
    return items


def _freed(items: Sequence[_Item]) -> list[int]:
    """Per item the bytes that destroys waiting for it alone will free, less what it acquires."""
    gain = [-sum(item.acquires.values()) for item in items]
    for item in items:
        if item.releases and len(item.before) == 1:
            gain[next(iter(item.before))] += sum(item.steps[0].releases.values())
    return gain


class _Run:
    """One greedy pass over the items."""

    def __init__(
        self, items: Sequence[_Item], used: Mapping[int, int], capacity: Mapping[int, int], waiting: Sequence[int]
    ) -> None:
        self._items = items
        self._used = Counter(used)
        self._capacity = capacity
        self._waiting = list(waiting)
        self._done: dict[int, None] = {}
        self._before = [set(item.before) for item in items]
        self._ancestors: dict[int, set[int]] = {}
        self._acquired: Counter[int] = Counter()
        self._start = Counter(used)
        self._releasers: dict[int, list[int]] = defaultdict(list)
        self._edges: list[Edge] = []

    def order(self) -> tuple[list[int], list[Edge]]:
        """Item indices in execution order, and the RESOURCE edges they need."""
        while self._waiting:
            ready = [index for index in self._waiting if self._before[index] <= self._done.keys()]
            chosen = next((i for i in ready if self._items[i].releases), None)
            if chosen is None:
                chosen = next((i for i in ready if not self._short(i)), None)
            if chosen is None:
                raise self._blocked(ready)
            self._take(chosen)
            self._waiting.remove(chosen)
        return list(self._done), self._edges

    def _short(self, index: int) -> dict[int, int]:
        """Device → bytes missing for an acquiring item now."""
        missing: dict[int, int] = {}
        for device, wanted in self._items[index].acquires.items():
            over = self._used[device] + wanted - self._capacity.get(device, self._used[device] + wanted)
            if wanted and over > 0:
                missing[device] = over
        return missing

    def _take(self, index: int) -> None:
        item = self._items[index]
        for device, wanted in item.acquires.items():
            self._wait_for_releases(index, device, wanted)
        self._used.update(item.acquires)
        self._acquired.update(item.acquires)
        for device, released in item.steps[0].releases.items() if item.releases else ():
            self._used[device] -= released
            self._releasers[device].append(index)
        self._ancestors[index] = self._reach(index)
        self._done[index] = None

    def _reach(self, index: int) -> set[int]:
        return self._before[index].union(*(self._ancestors[earlier] for earlier in self._before[index]))

    def _wait_for_releases(self, index: int, device: int, wanted: int) -> None:
        """Add edges from destroys on `device` until what surely happened before leaves room for `wanted`."""
        limit = self._capacity.get(device)
        if limit is None or not wanted:
            return
        reach = self._reach(index)
        level = self._start[device] + self._acquired[device] + wanted
        level -= sum(self._released(i, device) for i in self._releasers[device] if i in reach)
        for releaser in self._releasers[device]:
            if level <= limit:
                return
            if releaser not in reach:
                level -= self._released(releaser, device)
                self._before[index].add(releaser)
                earlier = self._items[releaser].steps[0].id
                for step in self._items[index].steps:
                    if device in step.acquires:
                        self._edges.append(Edge(earlier, step.id, EdgeKind.RESOURCE))

    def _released(self, index: int, device: int) -> int:
        return self._items[index].steps[0].releases.get(device, 0)

    def _blocked(self, ready: Sequence[int]) -> BlockedError:
        missing = self._short(ready[0])
        device, short = max(missing.items(), key=lambda entry: entry[1])
        step = self._items[ready[0]].steps[0]
        return BlockedError(
            f"{step.group} cannot start: device {device} is {short:,} bytes short of its capacity of "
            f"{self._capacity[device]:,}, and no unit on it can be destroyed before",
            missing,
            tuple(step for index in self._waiting for step in self._items[index].steps),
        )
