"""Which device takes which position of the goal units: as few bytes as possible move (D6.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from nereus.core import EMUBlock, EMUSet, Layout, ModelStage, Plan, StateSchema
from nereus.transition.deal import deal
from nereus.transition.keep import keep
from nereus.transition.profile import Ints
from nereus.transition.rows import ByDevice, Lookup, block_of, held_at, looked_up, rows_of
from nereus.transition.site import Site
from nereus.transition.sizes import need_schemas, sizes_of


class _Numbers:
    """The node and the kind of each device as numbers, found when first asked for."""

    def __init__(self, site: Site) -> None:
        self._site = site

    @cached_property
    def nodes(self) -> Lookup:
        """(devices,) → their nodes; all on one when none are known."""
        return ByDevice(self._site.node_of) if self._site.node_of else np.zeros_like

    @cached_property
    def kinds(self) -> ByDevice | None:
        """Nothing where all devices are of one kind."""
        kinds = self._site.kind_of
        number = {kind: index for index, kind in enumerate(set(kinds.values()))}
        return ByDevice({device: number[kind] for device, kind in kinds.items()}) if len(number) > 1 else None


def place(
    start: EMUSet,
    plan: Plan,
    schemas: Mapping[ModelStage, StateSchema],
    site: Site | None = None,
) -> EMUSet:
    """The goal units of `plan`, on the devices it names.

    An existing unit that fits is kept whole. The other positions of a model-stage are dealt to its devices by linear
    assignment on overlapping bytes. Where nodes are known, positions that the plan put on one stay together on one:
    what crosses nodes in the plan does so in the goal. Nodes whose devices differ in kind do not change places.
    """
    numbers = _Numbers(site or Site())
    blocks: list[EMUBlock] = []
    for assignment in plan.assignments:
        candidate = assignment.candidate
        wanted = EMUBlock(candidate.model_stage, candidate.layout, assignment.units)
        existing = start.blocks(candidate.model_stage)
        if existing and wanted not in existing:
            need_schemas(schemas, (candidate.model_stage,))
            wanted = _placed(existing, wanted, schemas[candidate.model_stage], numbers)
        blocks.append(wanted)
    return EMUSet.of_blocks(blocks)


def _placed(
    existing: Sequence[EMUBlock],
    wanted: EMUBlock,
    schema: StateSchema,
    numbers: _Numbers,
) -> EMUBlock:
    layout, slots = wanted.layout, rows_of(wanted)
    goal, free, unfilled = slots.copy(), slots.ravel(), np.arange(len(slots))
    for block in existing:
        if block.layout == layout:
            taken_by = keep(rows_of(block), slots, numbers.nodes)
            filled, unfilled = np.flatnonzero(taken_by >= 0), np.flatnonzero(taken_by < 0)
            taken = rows_of(block)[taken_by[filled]]
            goal[filled] = taken
            free = free[looked_up(free, taken.ravel(), np.ones(taken.size, dtype=np.int64), 0) == 0]
    if len(unfilled):
        overlap, held = overlaps(existing, layout, schema, free)
        dealt = deal(free, held, slots[unfilled].ravel(), overlap, numbers.nodes, numbers.kinds)
        goal[unfilled] = dealt.reshape(-1, layout.size)
    return wanted if np.array_equal(goal, slots) else block_of(wanted.model_stage, layout, goal)


def overlaps(existing: Sequence[EMUBlock], layout: Layout, schema: StateSchema, free: Ints) -> tuple[Ints, Ints]:
    """(what can be held, positions of `layout`) bytes in common, and which row of it each of `free` holds.

    The last row is that of devices that hold nothing.
    """
    sizes = sizes_of(schema)
    tables = [sizes.overlap(block.layout, layout) for block in existing]
    return np.concatenate([*tables, np.zeros((1, layout.size), dtype=np.int64)]), held_at(existing, free)
