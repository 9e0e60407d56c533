"""One global order for the local DAGs, with RESOURCE edges where memory is short (paper §6.1, D6.4)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf

from nereus.core import (
    EMU,
    Destroy,
    Edge,
    EdgeKind,
    EMUSet,
    InfeasibleError,
    Offload,
    Primitive,
    TransitionDAG,
)
from nereus.transition.bound import bound_bytes
from nereus.transition.decompose import Build, LocalDAG
from nereus.transition.following import follow
from nereus.transition.lead import Lead
from nereus.transition.room import Room, Step
from nereus.transition.rule import Rule
from nereus.transition.run import Run, Stuck
from nereus.transition.site import Site
from nereus.transition.steps import primitives

IN_PLACE, BESIDE, IN_TURN = "in place", "beside", "in turn"
"""Ways to decompose: storage is taken over wherever units are read in place; not where what is built from them would
have no room beside them; every new replica is read from the units of the start in turn."""
TRIES = (
    (IN_PLACE, Rule()),
    (IN_PLACE, Rule(longest_first=True, patient=True, eager=True, early=True, prudent=True)),
    (BESIDE, Rule(fresh=True)),
    (IN_PLACE, Rule(longest_first=True, patient=True, early=True, fresh=True, prudent=True)),
    (IN_PLACE, Rule(longest_first=True, patient=True, eager=True, early=True)),
    (BESIDE, Rule(patient=True, eager=True, early=True, fresh=True)),
    (IN_PLACE, Rule(patient=True, prudent=True)),
    (IN_TURN, Rule(patient=True, early=True, prudent=True)),
)
"""Made in turn until one meets the lower bound or the next is not worth it; the shortest order wins. Those that save
most on top of the ones before come first, over pairs of plans on 64 to 1,024 devices."""
TRIED_GROUPS = 1000
"""Once there is an order, and so many commit groups have been ordered in all, nothing more is tried."""
GROUP_S = 45e-6
"""CPU seconds that a try takes for each group."""
SAVED = (0.5, 0.5, 0.5, 0.5, 0.001, 0.5, 0.5, 0.001)
"""Where there is an order, each try is worth up to this part of the time above the bound: little for two that seldom
help then, but find orders where others end blocked."""


class BlockedError(InfeasibleError):
    """No group can start any more, and no unit can leave to make room."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by device: in use at the start, the most that may be, and what of the use is no unit's.

    `buffer_bytes` must be free on each device that receives.
    """

    used: Mapping[int, int]
    capacity: Mapping[int, int]
    other: Mapping[int, int]
    buffer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Aim:
    """How long to look for a shorter order.

    No order takes less than `least_bytes` (None: not known yet), none shorter than `enough_bytes` is looked for, and
    only those shorter than `limit_bytes` count. Nothing more is tried once `tried_groups` have been in all; None: once
    there is an order and many have been.
    """

    least_bytes: float | None = None
    enough_bytes: float = 0.0
    tried_groups: int | None = None
    limit_bytes: float = inf
    hopeless: Callable[[], bool] = lambda: False
    """Whether it can be shown that there is no order; asked when the first ends blocked."""


def schedule(
    start: EMUSet,
    goal: EMUSet,
    ways: Mapping[str, Sequence[LocalDAG]],
    memory: Memory,
    site: Site | None = None,
    lead: Lead | None = None,
    aim: Aim | None = None,
) -> TransitionDAG:
    """The global DAG, its primitives in execution order, and the bound that any order takes.

    Of `ways` to decompose, the one with the shortest order found. Release before acquire, then stage order; an
    acquisition that fits only after a Destroy or Offload gets an edge from it. Raises BlockedError when all ends in
    dead ends or is too long for `aim`, which does not mean that there is no order.
    """
    site, aim = site or Site(), aim or Aim()
    if (least := aim.least_bytes) is None:
        least = bound_bytes(ways[IN_PLACE], memory.used, memory.capacity, site)
    enough, limit, impatient = max(least, aim.enough_bytes), aim.limit_bytes, aim.limit_bytes < inf
    best: Run | None = None
    budget = TRIED_GROUPS if aim.tried_groups is None else aim.tried_groups
    tries = _Tries(ways, memory, site, lead)
    for (way, rule), saved in zip(TRIES, SAVED, strict=True):
        if not tries.differs(way, rule):
            continue
        groups = sum(len(local.builds) for local in ways[way])
        worth = budget > 0 and groups * GROUP_S * site.bytes_per_s <= saved * (limit - enough)
        if tries.made and (limit <= enough or (impatient and not worth)):
            continue
        budget -= groups
        run, stuck = tries.make(way, rule, limit)
        if stuck is not None:
            impatient |= aim.tried_groups is not None
            if len(tries.made) == 1 and aim.hopeless():
                break
        elif not run.late:
            best, limit, impatient = run, run.span_bytes, True
    if best is None:
        raise tries.blocked or BlockedError(f"no order shorter than {aim.limit_bytes:,.0f} bytes was found")
    return _dag(start, goal, best, round(least))


class _Tries:
    """Those made for one transition: what each was, and the room for each way to decompose, found once."""

    def __init__(self, ways: Mapping[str, Sequence[LocalDAG]], memory: Memory, site: Site, lead: Lead | None) -> None:
        self._ways, self._memory, self._site, self._lead = ways, memory, site, lead
        self.made: list[tuple[str, Rule, Set[str]]] = []
        """Way, rule, and the fields of rules that make a difference to it."""
        self.blocked: BlockedError | None = None
        """Why the last one ended without all groups; where one was short of memory, the last such."""
        self._rooms: dict[str, Room] = {}
        """Way → the room for it."""

    def differs(self, way: str, rule: Rule) -> bool:
        """Whether a try could lead to another order than those made."""
        return way in self._ways and not any(
            way == other and rule.like(done, minds) for other, done, minds in self.made
        )

    def make(self, way: str, rule: Rule, limit_bytes: float) -> tuple[Run, Stuck | None]:
        """One order of a way, as far as it goes."""
        run, stuck = _attempt(self._ways[way], self._room(way), self._site, rule, self._lead, limit_bytes)
        self.made.append((way, rule, run.minds))
        if stuck is not None and (stuck.short_bytes or self.blocked is None or not self.blocked.short_bytes):
            self.blocked = _blocked(stuck, self._memory)
        return run, stuck

    def _room(self, way: str) -> Room:
        if way in self._rooms:
            return self._rooms[way].afresh()
        memory, builds = self._memory, [build for local in self._ways[way] for build in local.builds]
        room = self._rooms[way] = Room(memory.used, memory.capacity, builds, memory.buffer_bytes)
        return room


def _attempt(
    locals_: Sequence[LocalDAG], room: Room, site: Site, rule: Rule, lead: Lead | None, limit_bytes: float
) -> tuple[Run, Stuck | None]:
    fresh = [local.copy() for local in locals_]
    run = Run(fresh, room, site, rule, limit_bytes)
    if lead is not None:
        follow(run, lead, [build for local in fresh for build in local.builds])
    return run, run.walk()


def _blocked(stuck: Stuck, memory: Memory) -> BlockedError:
    if not stuck.short_bytes:
        return BlockedError(
            f"{stuck.build.name} cannot start: every unit it could be built from has to leave before", {}
        )
    device, short = max(stuck.short_bytes.items(), key=lambda entry: entry[1])
    return BlockedError(
        f"{stuck.build.name} cannot start: device {device} is {short:,} bytes short of its capacity of "
        f"{memory.capacity[device]:,}, and no unit on it can be destroyed before",
        stuck.short_bytes,
    )


def _dag(start: EMUSet, goal: EMUSet, run: Run, bound: int) -> TransitionDAG:
    """Primitives and edges of an order."""
    made: list[Primitive] = []
    edges: list[Edge] = []
    last: dict[int, tuple[Primitive, ...]] = {}
    """id of a step → its primitives."""
    staged: dict[EMU, str] = {}
    """Unit → id of its Offload."""
    destroys = run.destroy_names()
    for step in run.order:
        steps, inner = _primitives(step, run, destroys, staged)
        last[id(step)] = steps
        made.extend(steps)
        edges.extend(inner)
        edges.extend(_waits(step, steps, run, last))
        for unit in {unit for each in steps for unit in each.sources} & staged.keys() if staged else ():
            edges.extend(Edge(staged[unit], each.id, EdgeKind.STATE) for each in steps)
        if step.offload:
            staged[steps[0].sources[0]] = steps[0].id
    return TransitionDAG(start, goal, tuple(made), tuple(edges), run.site.node_of, round(run.span_bytes), bound)


def _primitives(
    step: Step, run: Run, names: Mapping[int, str], staged: Collection[EMU]
) -> tuple[tuple[Primitive, ...], tuple[Edge, ...]]:
    if step.build is not None:
        return primitives(step.build, run.sub(step.build), staged)
    assert step.holder is not None
    unit, name = step.holder.unit, names[id(step.holder)]
    if step.offload:
        name = name.replace("/destroy", "/offload")
        return (Offload(name, (unit,), (), name, releases=step.releases, hosts=step.releases),), ()
    return (Destroy(name, (unit,), (), name, releases=step.releases),), ()


def _waits(
    step: Step, steps: Sequence[Primitive], run: Run, last: Mapping[int, tuple[Primitive, ...]]
) -> Iterable[Edge]:
    """Edges from other steps: what it reads, who has read it, and what frees the memory it needs."""
    makers = {id(run.steps[id(holder.maker)]): None for holder in step.sources if holder.maker is not None}
    for maker in makers:
        yield from (Edge(last[maker][-1].id, each.id, EdgeKind.STATE) for each in steps)
    reading: Iterable[Build] = step.holder.groups if step.holder is not None and not step.offload else ()
    for build in reading:
        yield from (Edge(each.id, steps[0].id, EdgeKind.STATE) for each in last[id(run.steps[id(build)])])
    for other, devices in step.after.values():
        for each in steps:
            if any(device in each.acquires for device in devices):
                yield Edge(last[id(other)][-1].id, each.id, EdgeKind.RESOURCE)
