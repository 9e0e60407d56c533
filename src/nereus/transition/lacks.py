"""What each position of some target layouts lacks of the state, and which positions of the source layouts own it.

It depends on layouts alone, so it is found once for all jobs between units of the same layouts, whatever their devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nereus.core import Layout, StateSchema
from nereus.transition.classes import Family, TensorClass, classes
from nereus.transition.profile import KNOWN_LAYOUTS, PerSchema, Recent

KNOWN_POSITIONS = 4096
"""What so many positions of targets lack is remembered of each pair of sets of layouts."""
NOTHING = (0, 0)
"""The region of a position that has none."""

Part = tuple[int, int, int]
"""(family, start, stop) of a range, in steps of the family; all its tensors have the same owners."""


@dataclass(frozen=True, slots=True)
class Lack:
    """What a position lacks and the same positions of the sources own: in several parts, so many elements in all.

    Of what nobody owns there are no positions.
    """

    positions: tuple[int, ...]
    parts: tuple[Part, ...]
    elements: int


class Lacks:
    """The positions of all source layouts are numbered one after another, and so are those of all target layouts."""

    def __init__(self, families: Sequence[Family], sources: Iterable[Layout], targets: Iterable[Layout]) -> None:
        self.families = families
        self.step_elements = [sum(members.step_elements for members in family) for family in families]
        """Elements of one step of all tensors of each family."""
        firsts = [family[0] for family in families]
        self.source_base, self._held = _regions(sources, firsts)
        self.target_base, self._need = _regions(targets, firsts)
        self._pieces = [_Pieces(regions) for regions in _by_family(self._held, len(families))]
        self._known = Recent[tuple[int, int], tuple[tuple[Lack, ...], tuple[Part, ...]]](KNOWN_POSITIONS)

    def of(self, target: int, source: int) -> tuple[tuple[Lack, ...], tuple[Part, ...]]:
        """What a device lacks at a target position whose source position, -1 for none, is `source`; what it has."""
        return self._known.get((target, source), lambda: self._of(target, source))

    def _of(self, target: int, source: int) -> tuple[tuple[Lack, ...], tuple[Part, ...]]:
        held = self._held[source] if source >= 0 else {}
        lacked: dict[tuple[int, ...], list[Part]] = {}
        copied: list[Part] = []
        for family, need in self._need[target].items():
            low, high = held.get(family, NOTHING)
            for start, stop, positions in self._pieces[family].within(*need):
                if low <= start and stop <= high:
                    copied.append((family, start, stop))
                else:
                    lacked.setdefault(positions, []).append((family, start, stop))
        each = self.step_elements
        return tuple(
            Lack(positions, tuple(parts), sum((stop - start) * each[family] for family, start, stop in parts))
            for positions, parts in lacked.items()
        ), tuple(copied)


Regions = list[dict[int, tuple[int, int]]]
"""Position → family → the interval that it owns, in steps, none that are empty."""


def _regions(layouts: Iterable[Layout], families: Sequence[TensorClass]) -> tuple[dict[Layout, int], Regions]:
    """The number of the first position of each layout, and what all positions own."""
    base: dict[Layout, int] = {}
    found: Regions = []
    for layout in layouts:
        base[layout] = len(found)
        own: Regions = [{} for _ in range(layout.size)]
        for index, members in enumerate(families):
            for pp_rank in members.holders[layout]:
                for tp_rank, (start, stop) in enumerate(members.intervals[layout.tp]):
                    if start < stop:
                        own[pp_rank * layout.tp + tp_rank][index] = (start, stop)
        found.extend(own)
    return base, found


def _by_family(regions: Regions, families: int) -> list[list[tuple[int, int, int]]]:
    """For each family (start, stop, position), positions in order."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(families)]
    for position, own in enumerate(regions):
        for family, (start, stop) in own.items():
            found[family].append((start, stop, position))
    return found


class _Pieces:
    """The ranges between all marks where the region of a position starts or stops, and who owns each."""

    def __init__(self, regions: Sequence[tuple[int, int, int]]) -> None:
        self._marks = marks = sorted({mark for start, stop, _ in regions for mark in (start, stop)})
        place = {mark: index for index, mark in enumerate(marks)}
        owners: list[list[int]] = [[] for _ in marks]
        for start, stop, position in regions:
            for piece in range(place[start], place[stop]):
                owners[piece].append(position)
        self._owners = [tuple(each) for each in owners]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(start, stop, owners) of each piece of an interval; what nobody owns is one of its own."""
        at = start
        for low, high, owners in zip(self._marks, self._marks[1:], self._owners, strict=False):
            if high <= at or low >= stop:
                continue
            if low > at:
                yield at, low, ()
            yield max(low, at), min(high, stop), owners
            at = min(high, stop)
        if at < stop:
            yield at, stop, ()


class _Known:
    """The lacks of one schema, for the layouts of sources and of targets."""

    def __init__(self, schema: StateSchema) -> None:
        self._schema = schema
        self._found = Recent[tuple[tuple[Layout, ...], tuple[Layout, ...]], Lacks](KNOWN_LAYOUTS)

    def of(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Lacks:
        """What units of `targets` lack of units of `sources`."""
        return self._found.get(
            (sources, targets), lambda: Lacks(classes(self._schema, (*sources, *targets)), sources, targets)
        )


lacks_of = PerSchema(_Known)
