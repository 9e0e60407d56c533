"""Classes of tensors that any set of layouts treats alike: what is computed for one holds for all of a class.

The 30 identical layers of a model collapse to a handful of classes, so planning costs do not grow with depth (D6.8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from nereus.core import EMU, Layout, StateSchema, TensorSpec
from nereus.transition.profile import Profile, end_ranks, profile_of


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors of equal shape and cut whose pp ranks agree in every layout of `holders`."""

    tensors: tuple[TensorSpec, ...]
    row_elements: int
    """Elements of one index of the cut dim."""
    step: int
    """Indices that are never cut apart; `intervals` counts them as one."""
    intervals: Mapping[int, tuple[tuple[int, int], ...]]
    """TP degree → what each rank owns of the cut dim."""
    holders: Mapping[Layout, tuple[int, ...]]

    @property
    def step_elements(self) -> int:
        """Elements of one step of all tensors."""
        return len(self.tensors) * self.step * self.row_elements

    @property
    def sample(self) -> TensorSpec:
        """The first tensor, which stands for all."""
        return self.tensors[0]


Family = tuple[TensorClass, ...]
"""Classes whose regions are the same, counted in steps: what is found for the first holds for all."""


def classes(schema: StateSchema, layouts: Collection[Layout]) -> tuple[Family, ...]:
    """The tensors of `schema` grouped by what `layouts` make of them."""
    families: dict[object, list[TensorClass]] = {}
    for each in _classes(profile_of(schema), tuple(dict.fromkeys(layouts))):
        families.setdefault((*each.intervals.values(), *each.holders.values()), []).append(each)
    return tuple(map(tuple, families.values()))


def _classes(profile: Profile, layouts: tuple[Layout, ...]) -> Iterator[TensorClass]:
    ranks = [profile.ranks(layout).tolist() for layout in layouts]
    runs = list(zip(*ranks, strict=True)) if ranks else [()] * len(profile.type_of)
    """Layer → the pp rank that holds it in each layout."""
    for kind, tensors in enumerate(profile.tensors):
        cut = (int(profile.row_elements[kind]), *_intervals(profile, kind, {layout.tp for layout in layouts}))
        if tensors[0].layer is None:
            held = {layout: end_ranks(tensors[0].where, layout.pp) for layout in layouts}
            yield TensorClass(tensors, *cut, held)
            continue
        alike: dict[tuple[int, ...], list[TensorSpec]] = {}
        for tensor in tensors:
            alike.setdefault(runs[tensor.layer or 0], []).append(tensor)
        for run, members in alike.items():
            held = {layout: (rank,) for layout, rank in zip(layouts, run, strict=True)}
            yield TensorClass(tuple(members), *cut, held)


def _intervals(
    profile: Profile, kind: int, degrees: Iterable[int]
) -> tuple[int, dict[int, tuple[tuple[int, int], ...]]]:
    """Indices of a step, and TP degree → intervals in steps."""
    bounds = {}
    for tp in sorted(degrees):
        shards = profile.shards(tp)
        bounds[tp] = list(zip(shards.start[kind].tolist(), shards.stop[kind].tolist(), strict=True))
    step = gcd(*(mark for intervals in bounds.values() for interval in intervals for mark in interval)) or 1
    scaled = {tp: tuple((low // step, high // step) for low, high in found) for tp, found in bounds.items()}
    return step, scaled


def layouts_of(units: Iterable[EMU]) -> tuple[Layout, ...]:
    """The distinct layouts of `units`, in order."""
    found: dict[Layout, None] = {}
    last = None
    for unit in units:
        if unit.layout is not last:  # most follow one of their own
            last = unit.layout
            found[last] = None
    return tuple(found)
