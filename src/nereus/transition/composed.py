"""The paper's own composition of a transition (§5.2, §6.1): whole units of the common layout T_sub in between.

Split gathers every old unit into T_sub units, redundant ones are destroyed, Extend copies whole T_sub units, Merge cuts
the goal units out of them. It moves C bytes instead of M* and holds whole T_sub units at once; the default moves only
what a device lacks. The one mode in which T_sub units exist (D6.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from nereus.core import EMU, Assignment, EMUSet, Layout, ModelStage, Plan, StateSchema, TransitionDAG
from nereus.transition.budget import Budget
from nereus.transition.classes import layouts_of
from nereus.transition.compile import connect
from nereus.transition.steps import labels, positions


def compose(
    start: EMUSet,
    plan: Plan,
    schemas: Mapping[ModelStage, StateSchema],
    budget: Budget | None = None,
) -> tuple[TransitionDAG, TransitionDAG, TransitionDAG]:
    """Three transitions to be executed one after another: to T_sub units, to as many as are needed, to `plan`.

    T_sub units whose devices the plan names for their model-stage are kept where they are. Raises InfeasibleError when
    the T_sub units do not fit in the memory of `budget`.
    """
    split: list[EMU] = []
    needed: list[EMU] = []
    goal: list[EMU] = []
    for assignment in plan.assignments:
        pieces, whole, target = _stages(start.of(assignment.candidate.model_stage), assignment)
        split.extend(pieces)
        needed.extend(whole)
        goal.extend(target)
    ends = (start, EMUSet(tuple(split)), EMUSet(tuple(needed)), EMUSet(tuple(goal)))
    first, second, third = (connect(before, after, schemas, budget) for before, after in pairwise(ends))
    return first, second, third


def _stages(units: Sequence[EMU], assignment: Assignment) -> tuple[list[EMU], list[EMU], list[EMU]]:
    """The T_sub units after the Splits, those that the Merges need, and the goal units. Units that stay are in all."""
    layout, wanted = assignment.candidate.layout, set(assignment.units)
    kept = [unit for unit in units if unit.layout == layout and unit.devices in wanted]
    stays = {unit.devices for unit in kept}
    slots = [slot for slot in assignment.units if slot not in stays]
    if not units or not slots:
        after = [*kept, *(EMU(assignment.candidate.model_stage, layout, slot) for slot in slots)]
        return list(units), after, after
    sub = layout.common(*layouts_of(units))
    pieces = [piece for unit in units if unit not in kept for piece in labels(unit, sub)]
    pool = [device for slot in slots for device in slot]
    inside = _inside(pieces, pool)
    taken = {device for piece in inside for device in piece.devices}
    free = [device for device in pool if device not in taken]
    fresh = [EMU(units[0].model_stage, sub, tuple(free[i : i + sub.size])) for i in range(0, len(free), sub.size)]
    share = layout.size // sub.size
    parts = [*inside, *fresh]
    goal = [_merged(parts[i : i + share], layout, sub) for i in range(0, len(parts), share)]
    return [*kept, *pieces], [*kept, *parts], [*kept, *goal]


def _inside(pieces: Iterable[EMU], pool: Sequence[int]) -> list[EMU]:
    """Pieces all of whose devices stay, in the order in which the plan names their devices."""
    place = {device: index for index, device in enumerate(pool)}
    found = [piece for piece in pieces if place.keys() >= set(piece.devices)]
    return sorted(found, key=lambda piece: min(place[device] for device in piece.devices))


def _merged(parts: Sequence[EMU], layout: Layout, sub: Layout) -> EMU:
    """The unit that `parts` make: the opposite of `labels`."""
    devices = [0] * layout.size
    for part, places in zip(parts, positions(layout, sub), strict=True):
        for device, index in zip(part.devices, places, strict=True):
            devices[index] = device
    return EMU(parts[0].model_stage, layout, tuple(devices))
