"""Classes of tensors that any set of layouts treats alike: what is computed for one holds for all of a class.

The 30 identical layers of a model collapse to a handful of classes, so planning costs do not grow with depth (D6.8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from nereus.core import EMU, Layout, StateSchema, TensorSpec
from nereus.transition.profile import PerSchema, end_ranks, profile_of


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


class _Classes:
    """The classes of one schema, found once for each set of layouts."""

    def __init__(self, schema: StateSchema) -> None:
        self._profile = profile_of(schema)
        self._found: dict[tuple[Layout, ...], tuple[TensorClass, ...]] = {}

    def of(self, layouts: tuple[Layout, ...]) -> tuple[TensorClass, ...]:
        """The classes for distinct layouts."""
        if layouts not in self._found:
            self._found[layouts] = tuple(self._make(layouts))
        return self._found[layouts]

    def _make(self, layouts: tuple[Layout, ...]) -> Iterator[TensorClass]:
        profile = self._profile
        ranks = [profile.ranks(layout).tolist() for layout in layouts]
        runs = list(zip(*ranks, strict=True)) if ranks else [()] * len(profile.type_of)
        """Layer → the pp rank that holds it in each layout."""
        for tensors in profile.tensors:
            if tensors[0].layer is None:
                held = {layout: end_ranks(tensors[0].where, layout.pp) for layout in layouts}
                yield TensorClass(tensors, held)
                continue
            alike: dict[tuple[int, ...], list[TensorSpec]] = {}
            for tensor in tensors:
                alike.setdefault(runs[tensor.layer or 0], []).append(tensor)
            for run, members in alike.items():
                held = {layout: (rank,) for layout, rank in zip(layouts, run, strict=True)}
                yield TensorClass(tuple(members), held)


_classes_of = PerSchema(_Classes)


def classes(schema: StateSchema, layouts: Collection[Layout]) -> tuple[TensorClass, ...]:
    """The tensors of `schema` grouped by what `layouts` make of them."""
    return _classes_of(schema).of(tuple(dict.fromkeys(layouts)))


def by_layout(units: Iterable[EMU]) -> dict[Layout, list[EMU]]:
    """The units of each layout, in order of first appearance."""
    found: dict[Layout, list[EMU]] = {}
    last, own = None, list[EMU]()
    for unit in units:
        if unit.layout is not last:  # most follow one of their own
            last = unit.layout
            own = found.setdefault(last, [])
        own.append(unit)
    return found


def layouts_of(units: Iterable[EMU]) -> tuple[Layout, ...]:
    """The distinct layouts of `units`, in order."""
    return tuple(by_layout(units))
