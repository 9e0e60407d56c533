"""From the units that exist to a plan: place → decompose → schedule → fit."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.core import EMU, Destroy, EMUSet, InfeasibleError, ModelStage, Plan, StateSchema, TransitionDAG
from nereus.transition.decompose import LocalDAG, decompose
from nereus.transition.fit import fit
from nereus.transition.place import place
from nereus.transition.schedule import BlockedError, schedule


def compile(
    start: EMUSet,
    plan: Plan,
    schemas: Mapping[ModelStage, StateSchema],
    capacity: Mapping[int, int],
    other_bytes: Mapping[int, int] | None = None,
    node_of: Mapping[int, int] | None = None,
    kind_of: Mapping[int, str] | None = None,
) -> TransitionDAG:
    """The transition from `start` to `plan`. Raises InfeasibleError when memory allows no order of its steps."""
    goal = place(start, plan, schemas, node_of, kind_of)
    return connect(start, goal, schemas, capacity, other_bytes)


def connect(
    start: EMUSet,
    goal: EMUSet,
    schemas: Mapping[ModelStage, StateSchema],
    capacity: Mapping[int, int],
    other_bytes: Mapping[int, int] | None = None,
) -> TransitionDAG:
    """The transition between two sets of units whose positions are settled.

    Every replica is read at first, which spreads the load. Where that leaves an acquisition without memory, redundant
    units on the short devices give up their part as a source and are destroyed early, one after another.
    """
    model_stages = sorted({*start.model_stages, *goal.model_stages}, key=lambda ms: ms.sort_key)
    for ms in model_stages:
        if not start.of(ms):
            raise InfeasibleError(f"{ms}: no unit exists, so no transition can build the goal's; restart instead")
    unread: dict[ModelStage, set[EMU]] = {ms: set() for ms in model_stages}
    while True:
        locals_: list[LocalDAG] = [decompose(start.of(ms), goal.of(ms), schemas[ms], unread[ms]) for ms in model_stages]
        try:
            dag = schedule(start, goal, locals_, schemas, capacity, other_bytes)
        except BlockedError as blocked:
            extra = _expendable(start, blocked, unread)
            if extra is None:
                raise
            unread[extra.model_stage].add(extra)
        else:
            fit(dag, schemas, capacity, other_bytes)
            return dag


def _expendable(start: EMUSet, blocked: BlockedError, unread: Mapping[ModelStage, set[EMU]]) -> EMU | None:
    """A redundant unit whose early Destroy frees memory where it is short, the one that frees most there."""
    best: tuple[int, EMU] | None = None
    for step in blocked.waiting:
        unit = step.sources[0]
        others = [other for other in start.of(unit.model_stage) if other not in unread[unit.model_stage]]
        if not isinstance(step, Destroy) or unit in unread[unit.model_stage] or others == [unit]:
            continue
        gain = sum(min(step.releases.get(device, 0), short) for device, short in blocked.short_bytes.items())
        if gain and (best is None or gain > best[0]):
            best = (gain, unit)
    return None if best is None else best[1]
