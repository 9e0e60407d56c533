"""Primitives of one commit group in the default order Split → Extend → Merge, and their edges (paper §5.2, §6.1).

Moves are direct (D6.2): units of the common layout T_sub name what a Split or Extend makes, but never hold state of
their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from nereus.core import EMU, Edge, EdgeKind, Extend, Layout, Merge, Primitive, Split
from nereus.transition.decompose import Build, degrees


@dataclass(frozen=True, slots=True)
class _Draft:
    """A primitive before it is known what it acquires."""

    kind: type[Primitive]
    id: str
    sources: tuple[EMU, ...]
    targets: tuple[EMU, ...]

    def made(self, group: str, acquires: Mapping[int, int]) -> Primitive:
        """The primitive."""
        return self.kind(self.id, self.sources, self.targets, group, acquires)


def primitives(
    build: Build, sub: Layout, staged: Collection[EMU] = ()
) -> tuple[tuple[Primitive, ...], tuple[Edge, ...]]:
    """The primitives of a group in order, each device's new bytes on the first that touches it, and the inner edges.

    Units that are `staged` in host memory are read as they are: there is nothing on their devices to split.
    """
    name = build.name
    held = {device for unit in build.sources for device in unit.devices}
    if held.isdisjoint(build.acquires):
        return _fresh(build, sub)
    drafts, edges = _drafts(build, sub, held, staged)
    left = dict(build.acquires)
    made: list[Primitive] = []
    for draft in drafts:
        touched = {device for unit in (*draft.sources, *draft.targets) for device in unit.devices}
        acquires = {device: left.pop(device) for device in build.acquires if device in left and device in touched}
        made.append(draft.made(name, acquires))
    return tuple(made), tuple(edges)


def _fresh(build: Build, sub: Layout) -> tuple[tuple[Primitive, ...], tuple[Edge, ...]]:
    """One Extend to all goal units, as T_sub units where their degrees are not those, and a Merge of each such unit."""
    made = [(goal,) if degrees(goal.layout) == degrees(sub) else labels(goal, sub) for goal in build.goals]
    targets = tuple(unit for units in made for unit in units)
    extend = Extend(f"{build.name}/extend0", build.sources, targets, build.name, build.acquires)
    merges = [
        Merge(f"{build.name}/merge{index}", units, (goal,), build.name)
        for index, (goal, units) in enumerate(zip(build.goals, made, strict=True))
        if units != (goal,)
    ]
    return (extend, *merges), tuple(Edge(extend.id, merge.id, EdgeKind.STATE) for merge in merges)


def _drafts(
    build: Build, sub: Layout, held: Collection[int], staged: Collection[EMU]
) -> tuple[list[_Draft], list[Edge]]:
    """Splits, then per goal unit an Extend and a Merge as far as they are needed."""
    own = build.acquires.keys()
    whole = degrees(sub)
    local = [unit for unit in build.sources if not own.isdisjoint(unit.devices)]
    splitting = [unit for unit in local if degrees(unit.layout) != whole and unit not in staged]
    inside = len(build.sources) == 1 and own <= set(held)
    if splitting and inside and degrees(build.goals[0].layout) == whole:
        return [_Draft(Split, f"{build.name}/split", build.sources, build.goals)], []
    drafts = [
        _Draft(Split, f"{build.name}/split{index}", (unit,), labels(unit, sub)) for index, unit in enumerate(splitting)
    ]
    pieces = [(piece, draft.id) for draft in drafts for piece in draft.targets]
    pieces.extend((unit, "") for unit in build.sources if unit not in splitting)
    edges: list[Edge] = []
    for index, goal in enumerate(build.goals):
        merge = f"{build.name}/merge{index}"
        if not set(held).issuperset(goal.devices):
            extend = _Draft(Extend, f"{build.name}/extend{index}", build.sources, (goal,))
            drafts.append(extend)
            edges.append(Edge(extend.id, merge, EdgeKind.STATE))
        # Inside one unit the Split moves what the parts of it lack.
        taken = [(p, by) for p, by in pieces if not inside or not set(p.devices).isdisjoint(goal.devices)]
        edges.extend(Edge(by, merge, EdgeKind.STATE) for by in dict.fromkeys(by for _, by in taken if by))
        drafts.append(_Draft(Merge, merge, tuple(piece for piece, _ in taken), (goal,)))
    return drafts, edges


def labels(unit: EMU, sub: Layout) -> tuple[EMU, ...]:
    """The T_sub units that a unit's devices make: piece (a, b) takes the a-th of each run of tp ranks, b-th of pp."""
    devices = unit.devices
    return tuple(
        EMU(unit.model_stage, sub, tuple([devices[index] for index in piece])) for piece in positions(unit.layout, sub)
    )


@lru_cache(maxsize=256)
def positions(layout: Layout, sub: Layout) -> tuple[tuple[int, ...], ...]:
    """The positions of `layout` that make each T_sub unit."""
    tp_step, pp_step = layout.tp // sub.tp, layout.pp // sub.pp
    return tuple(
        tuple((p * pp_step + b) * layout.tp + t * tp_step + a for p in range(sub.pp) for t in range(sub.tp))
        for b in range(pp_step)
        for a in range(tp_step)
    )
