"""Which device takes which position of the goal units: as few bytes as possible move (D6.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nereus.core import EMUBlock, EMUSet, Layout, ModelStage, Plan, StateSchema
from nereus.transition.deal import deal
from nereus.transition.keep import keep
from nereus.transition.profile import Ints
from nereus.transition.rows import ByDevice, block_of, held_at, looked_up, rows_of
from nereus.transition.sizes import sizes_of


def place(
    start: EMUSet,
    plan: Plan,
    schemas: Mapping[ModelStage, StateSchema],
    node_of: Mapping[int, int] | None = None,
    kind_of: Mapping[int, str] | None = None,
) -> EMUSet:
    """The goal units of `plan`, on the devices it names.

    An existing unit that fits is kept whole. The other positions of a model-stage are dealt to its devices by linear
    assignment on overlapping bytes. With `node_of`, the positions that the plan put on one node stay together on one:
    what crosses nodes in the plan does so in the goal. Nodes whose devices differ by `kind_of` do not change places.
    """
    nodes = None if node_of is None else ByDevice(node_of)
    kinds = _numbered(kind_of)
    blocks: list[EMUBlock] = []
    for assignment in plan.assignments:
        candidate = assignment.candidate
        wanted = EMUBlock(candidate.model_stage, candidate.layout, assignment.units)
        existing = start.blocks(candidate.model_stage)
        done = not existing or any(wanted == block for block in existing)
        blocks.append(wanted if done else _placed(existing, wanted, schemas[candidate.model_stage], nodes, kinds))
    return EMUSet.of_blocks(blocks)


def _placed(
    existing: Sequence[EMUBlock],
    wanted: EMUBlock,
    schema: StateSchema,
    nodes: ByDevice | None,
    kinds: ByDevice | None,
) -> EMUBlock:
    layout, slots = wanted.layout, rows_of(wanted)
    goal, unfilled = slots.copy(), np.ones(len(slots), dtype=np.bool_)
    for block in existing:
        if block.layout == layout:
            units = rows_of(block)
            taken_by = keep(units, slots, nodes)
            unfilled = taken_by < 0
            goal[~unfilled] = units[taken_by[~unfilled]]
    if unfilled.any():
        taken, devices = goal[~unfilled].ravel(), slots.ravel()
        free = devices[looked_up(devices, taken, np.ones_like(taken), 0) == 0]
        named = slots[unfilled].ravel()
        overlap, held = overlaps(existing, layout, schema, free)
        at = (np.zeros_like(free), np.zeros_like(named)) if nodes is None else (nodes(free), nodes(named))
        kind = None if kinds is None else kinds(free)
        goal[unfilled] = deal(free, held, named, overlap, at, kind).reshape(-1, layout.size)
    return wanted if np.array_equal(goal, slots) else block_of(wanted.model_stage, layout, goal)


def overlaps(existing: Sequence[EMUBlock], layout: Layout, schema: StateSchema, free: Ints) -> tuple[Ints, Ints]:
    """(what can be held, positions of `layout`) bytes in common, and which row of it each of `free` holds.

    The last row is that of devices that hold nothing.
    """
    sizes = sizes_of(schema)
    tables = [sizes.overlap(block.layout, layout) for block in existing]
    return np.concatenate([*tables, np.zeros((1, layout.size), dtype=np.int64)]), held_at(existing, free)


def _numbered(kind_of: Mapping[int, str] | None) -> ByDevice | None:
    """The kinds as numbers; none where all devices are of one."""
    number = {kind: index for index, kind in enumerate(dict.fromkeys((kind_of or {}).values()))}
    if kind_of is None or len(number) < 2:
        return None
    return ByDevice({device: number[kind] for device, kind in kind_of.items()})
