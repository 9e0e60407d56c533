"""Which rank takes which position of a target, where the framework leaves that open: so that the least has to move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from nereus.core import SettingsError
from nereus.transition.boxes import LogicalTensor, Placement
from nereus.transition.region import Region

Position = Mapping[str, Region]
"""Name → box of everything one position holds."""


def place_positions(
    tensors: Iterable[LogicalTensor],
    source: Placement,
    positions: Sequence[Position],
    ranks: Sequence[int],
    replicas: Sequence[int] = (),
) -> Placement:
    """Give each position to another rank so that the bytes the ranks already hold are most; ties go in order.

    `replicas[i]` is the copy of the whole state that position i belongs to.
    """
    if len(positions) > len(ranks):
        raise SettingsError(f"{len(positions)} positions for {len(ranks)} ranks: each needs one of its own")
    sizes = {tensor.name: tensor.item_bytes for tensor in tensors}
    held = [source.of(rank) for rank in ranks]
    kept = np.zeros((len(positions), len(ranks)))
    for row, position in enumerate(positions):
        for column, own in enumerate(held):
            kept[row, column] = sum(
                common.elements * sizes[name]
                for name, box in position.items()
                if name in own and (common := box.common(own[name])) is not None
            )
    rows, columns = linear_sum_assignment(kept, maximize=True)
    chosen = {int(row): ranks[int(column)] for row, column in zip(rows, columns, strict=True)}
    boxes: dict[str, dict[int, Region]] = {}
    for index, position in enumerate(positions):
        for name, box in position.items():
            boxes.setdefault(name, {})[chosen[index]] = box
    return Placement(boxes, {chosen[index]: replica for index, replica in enumerate(replicas)})
