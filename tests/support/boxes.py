"""Random placements of tensors on ranks, and the ranks of a plan as dictionaries of numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.transition.boxes import BoxPlan, LogicalTensor, Placement
from nereus.transition.region import Region

Array = NDArray[Any]
Held = dict[tuple[int, str], Array]
"""(rank, name) → what the rank stores."""


def canonical(tensor: LogicalTensor) -> Array:
    """Every element a function of the tensor's name and the flat index."""
    seed = sum(map(ord, tensor.name)) * 7919
    return (np.arange(prod(tensor.shape), dtype=np.int64) + seed).reshape(tensor.shape)


def cut(tensors: Mapping[str, LogicalTensor], placement: Placement) -> Held:
    """What each rank must hold."""
    return {
        (rank, name): canonical(tensors[name])[tuple(map(slice, box.start, box.stop))].copy()
        for name, boxes in placement.boxes.items()
        for rank, box in boxes.items()
    }


def carry_out(plan: BoxPlan, held: Held) -> Held:
    """Run a plan in one process; every target element is written exactly once, from a rank that owns it."""
    result: Held = {}
    written: dict[tuple[int, str], Array] = {}
    for name, boxes in plan.target.boxes.items():
        for rank, box in boxes.items():
            result[rank, name] = np.full(box.shape, -1, dtype=np.int64)
            written[rank, name] = np.zeros(box.shape, dtype=np.int8)
            own = plan.source.boxes.get(name, {}).get(rank)
            same = box.common(own) if own is not None else None
            if own is not None and same is not None:
                result[rank, name][same.within(box)] = held[rank, name][same.within(own)]
                written[rank, name][same.within(box)] += 1
    for route in plan.routes:
        assert route.source != route.target
        for name in route.names:
            own, box = plan.source.boxes[name][route.source], plan.target.boxes[name][route.target]
            assert_inside(route.region, own)
            assert_inside(route.region, box)
            result[route.target, name][route.region.within(box)] = held[route.source, name][route.region.within(own)]
            written[route.target, name][route.region.within(box)] += 1
    assert all((count == 1).all() for count in written.values())
    return result


def assert_inside(inner: Region, outer: Region) -> None:
    assert all(a <= b for a, b in zip(outer.start, inner.start, strict=True))
    assert all(a >= b for a, b in zip(outer.stop, inner.stop, strict=True))


def lacks_items(tensors: Mapping[str, LogicalTensor], source: Placement, target: Placement) -> int:
    """Bytes that some rank has afterwards and had not before, counted element by element."""
    total = 0
    for name, boxes in target.boxes.items():
        for rank, box in boxes.items():
            mask = np.zeros(tensors[name].shape, dtype=bool)
            mask[tuple(map(slice, box.start, box.stop))] = True
            own = source.boxes.get(name, {}).get(rank)
            if own is not None:
                mask[tuple(map(slice, own.start, own.stop))] = False
            total += int(mask.sum()) * tensors[name].item_bytes
    return total
