"""Classes of tensors that any set of layouts treats alike: what is computed for one holds for all of a class.

The 30 identical layers of a model collapse to a handful of classes, so planning costs do not grow with depth (D6.8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from nereus.core import EMU, Layout, StateSchema, TensorSpec, Where


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors of equal shape and cut whose pp ranks agree in every layout of `holders`."""

    tensors: tuple[TensorSpec, ...]
    holders: Mapping[Layout, tuple[int, ...]]

    @property
    def sample(self) -> TensorSpec:
        """The first tensor, which stands for all."""
        return self.tensors[0]

    @property
    def dim(self) -> int:
        """The dim that intervals are ranges of."""
        return self.sample.cut.dim or 0

    @property
    def row_elements(self) -> int:
        """Elements of one index of the cut dim."""
        shape = self.sample.shape
        return self.sample.elements // shape[self.dim] if shape else 1

    def regions(self, unit: EMU) -> dict[int, tuple[int, int]]:
        """Device → non-empty interval of the cut dim that it owns in `unit`."""
        tp = unit.layout.tp
        intervals = [self.sample.interval(tp, rank) for rank in range(tp)]
        return {
            unit.devices[pp_rank * tp + rank]: (start, stop)
            for pp_rank in self.holders[unit.layout]
            for rank, (start, stop) in enumerate(intervals)
            if start < stop
        }


def classes(schema: StateSchema, layouts: Collection[Layout]) -> tuple[TensorClass, ...]:
    """The tensors of `schema` grouped by what `layouts` make of them, in order of first appearance."""
    distinct = tuple(dict.fromkeys(layouts))
    of_layer = [_layer_ranks(layout, schema.layers) for layout in distinct]
    found: dict[object, list[TensorSpec]] = {}
    ranks: dict[object, tuple[tuple[int, ...], ...]] = {}
    for tensor in schema.tensors:
        if tensor.layer is None:
            place = tuple(_end_ranks(tensor.where, layout.pp) for layout in distinct)
        else:
            place = tuple(by_layer[tensor.layer] for by_layer in of_layer)
        key = (place, tensor.shape, tensor.cut)
        found.setdefault(key, []).append(tensor)
        ranks[key] = place
    return tuple(
        TensorClass(tuple(tensors), dict(zip(distinct, ranks[key], strict=True))) for key, tensors in found.items()
    )


def layouts_of(units: Iterable[EMU]) -> tuple[Layout, ...]:
    """The distinct layouts of `units`, in order."""
    return tuple(dict.fromkeys(unit.layout for unit in units))


def _layer_ranks(layout: Layout, layers: int) -> list[tuple[int, ...]]:
    ranks: list[tuple[int, ...]] = []
    for pp_rank in range(layout.pp):
        ranks.extend([(pp_rank,)] * len(layout.layers_of(pp_rank, layers)))
    return ranks


def _end_ranks(where: Where, pp: int) -> tuple[int, ...]:
    ends = {Where.FIRST: (0,), Where.LAST: (pp - 1,), Where.BOTH_ENDS: (0, pp - 1)}[where]
    return tuple(dict.fromkeys(ends))
