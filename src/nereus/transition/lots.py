"""Which cells of a transition are ordered together: those that read from each other, as few as serve each other best.

A cell is a set of devices that units or nodes tie together. One that builds a unit without having any of the
model-stage reads another that has; while those are fewer than who reads them, readers are dealt to them evenly, and new
replicas forward. Where all are alike and build nothing else they take as many rounds as in the whole, as
ceil(log2(1 + n / h)) is the same for ceil(n / h) readers of one holder. Elsewhere the whole may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from nereus.transition.profile import Ints

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """What cells or lots hold and build, each (model-stages, cells or lots)."""

    held: Ints
    """Devices in units of the start."""
    wanted: Ints
    """Devices of new units that hold nothing that may be read in place."""

    @property
    def idle(self) -> Ints:
        """Devices in units of the start where nothing has to arrive."""
        return np.where(self.wanted.any(axis=0), 0, self.held)

    @property
    def apart(self) -> bool:
        """Whether each cell does as well alone as all together."""
        spare = self.held * (2 ** _rounds(self.held.sum(axis=1), self.wanted.sum(axis=1)) - 1)[:, None] - self.wanted
        helped = ((self.idle > 0) & (self.wanted == 0)).any(axis=1) & (self.wanted > self.idle).any(axis=1)
        return not (spare < 0).any() and not helped.any()


def _rounds(held: Ints, wanted: Ints) -> Ints:
    """In a round, each device that holds state sends it to one that does not."""
    found: Ints = np.maximum(1, np.ceil(np.log2(1 + wanted / np.maximum(1, held)) - 1e-9)).astype(np.int64)
    return found


class _Lots:
    """Cells that have been joined; the first of a lot stands for it."""

    def __init__(self, cells: int) -> None:
        self._parent = list(range(cells))

    def of(self, cell: int) -> int:
        """The lot of a cell."""
        parent = self._parent
        while parent[cell] != cell:
            parent[cell] = parent[parent[cell]]
            cell = parent[cell]
        return cell

    def join(self, lot: int, other: int) -> None:
        """Two lots become one, that of the first."""
        self._parent[other] = lot

    def numbers(self) -> Ints:
        """(cells,): lots from 0 on, by their first cell."""
        found: Ints = np.unique([self.of(cell) for cell in range(len(self._parent))], return_inverse=True)[1]
        return found.astype(np.int64)


@dataclass(slots=True)
class _Sum:
    """Devices of a lot that hold a model-stage, those that want it, those that hold it and have nothing else to do,
    and how often one wants any state.

    `ability` is how many a holder has served when time is up.
    """

    ability: int
    held: int = 0
    wanted: int = 0
    idle: int = 0
    work: int = 0

    @property
    def spare(self) -> int:
        """How many more could be served."""
        return self.ability * self.held - self.wanted

    def add(self, other: _Sum) -> None:
        """Count another lot in."""
        self.held += other.held
        self.wanted += other.wanted
        self.idle += other.idle
        self.work += other.work


def lots_of(needs: Needs, alike: Ints) -> Ints:
    """(cells,): the lot of each. `alike` numbers the cells that agree in all but their devices."""
    lots = _Lots(len(alike))
    order = np.argsort(alike, kind="stable").tolist()
    idle = needs.idle
    for stage in np.argsort((needs.held > 0).sum(axis=1), kind="stable"):
        if needs.wanted[stage].any():
            every = (needs.held[stage], needs.wanted[stage], idle[stage], needs.wanted.sum(axis=0))
            _deal(lots, order, *(each.tolist() for each in every))
    return lots.numbers()


def _deal(
    lots: _Lots,
    order: Sequence[int],
    held: Sequence[int],
    wanted: Sequence[int],
    idle: Sequence[int],
    work: Sequence[int],
) -> None:
    """Join cells so that each lot has what it wants of one model-stage in as many rounds as all cells together."""
    ability = int(2 ** _rounds(np.array(sum(held)), np.array(sum(wanted))) - 1)
    sums: dict[int, _Sum] = {}
    for cell in order:
        if held[cell] or wanted[cell]:
            lot = lots.of(cell)
            if lot not in sums:
                sums[lot] = _Sum(ability)
            sums[lot].add(_Sum(ability, held[cell], wanted[cell], idle[cell], work[cell]))
    rich = [(-own.spare, own.work, index, lot) for index, (lot, own) in enumerate(sums.items()) if own.held]
    heapify(rich)
    for lot in [lot for lot, own in sums.items() if not own.held]:
        *_, index, other = rich[0]
        lots.join(other, lot)
        own = sums[other]
        own.add(sums.pop(lot))
        heapreplace(rich, (-own.spare, own.work, index, other))
    _share(lots, sums)
    _help(lots, sums)


def _share(lots: _Lots, sums: dict[int, _Sum]) -> None:
    """Join lots that want more than they can have in time to those with most to spare, those that want nothing last."""
    poor = sorted((lot for lot, own in sums.items() if own.spare < 0), key=lambda lot: sums[lot].spare)
    if poor:
        rich = sorted(
            (lot for lot, own in sums.items() if own.spare > 0), key=lambda lot: (not sums[lot].wanted, sums[lot].spare)
        )
        served: list[int] = []
        for lot in poor:
            while sums[lot].spare < 0 and (rich or served):
                other = (rich or served).pop()
                lots.join(lot, other)
                sums[lot].add(sums.pop(other))
            if sums[lot].spare > 0:
                served.append(lot)


def _help(lots: _Lots, sums: dict[int, _Sum]) -> None:
    """Join idle lots to those whose holders have other things to do, while there are any."""
    short = [
        (own.idle - own.wanted, index, lot) for index, (lot, own) in enumerate(sums.items()) if own.wanted > own.idle
    ]
    heapify(short)
    for lot in [lot for lot, own in sums.items() if own.idle and not own.wanted] if short else ():
        lacking, index, reader = short[0]
        if lacking >= 0:
            return
        lots.join(reader, lot)
        heapreplace(short, (lacking + sums[lot].idle, index, reader))
