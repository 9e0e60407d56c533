"""A box of a tensor: one half-open range of indices in every dim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from nereus.core import SettingsError


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Indices [start, stop) in every dim of a tensor. A 0-dim tensor has one region, of one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise SettingsError(f"a box from {self.start} to {self.stop}: the number of dims differs")
        if any(not 0 <= low <= high for low, high in zip(self.start, self.stop, strict=True)):
            raise SettingsError(f"a box from {self.start} to {self.stop}: needs 0 <= start <= stop in every dim")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def along(cls, shape: Sequence[int], dim: int, start: int, stop: int) -> Region:
        """Indices [start, stop) of one dim, all of the others."""
        low, high = [0] * len(shape), list(shape)
        low[dim], high[dim] = start, stop
        return cls(tuple(low), tuple(high))

    @classmethod
    def chunk(cls, shape: Sequence[int], dim: int, parts: int, index: int) -> Region:
        """Part `index` as torch.chunk and FSDP2 cut: all parts of ceil(size / parts), the last ones less or empty."""
        step = -(-shape[dim] // parts)
        return cls.along(shape, dim, min(index * step, shape[dim]), min((index + 1) * step, shape[dim]))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the box."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def row_dim(self) -> int:
        """The outermost dim with more than one index: slices of it are as contiguous as the box."""
        return next((dim for dim, size in enumerate(self.shape) if size > 1), 0)

    def rows(self, start: int, stop: int) -> Region:
        """Rows [start, stop) of `row_dim`, counted from the start of the box."""
        if not self.start:
            return self
        dim = self.row_dim
        low, high = list(self.start), list(self.stop)
        low[dim], high[dim] = self.start[dim] + start, self.start[dim] + stop
        return Region(tuple(low), tuple(high))

    def common(self, other: Region) -> Region | None:
        """The elements both have; None when there are none."""
        low = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        return Region(low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None

    def minus(self, other: Region) -> list[Region]:
        """Disjoint boxes that hold what this one has and `other` has not."""
        inner = self.common(other)
        if inner is None:
            return [self] if self.elements else []
        left: list[Region] = []
        low, high = list(self.start), list(self.stop)
        for dim in range(len(low)):
            for start, stop in ((low[dim], inner.start[dim]), (inner.stop[dim], high[dim])):
                if start < stop:
                    left.append(Region((*low[:dim], start, *low[dim + 1 :]), (*high[:dim], stop, *high[dim + 1 :])))
            low[dim], high[dim] = inner.start[dim], inner.stop[dim]
        return left

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Where this box lies in an array that stores `outer`."""
        return tuple(
            slice(low - base, high - base) for low, high, base in zip(self.start, self.stop, outer.start, strict=True)
        )

    def __str__(self) -> str:
        ranges = ", ".join(f"{low}:{high}" for low, high in zip(self.start, self.stop, strict=True))
        return f"[{ranges}]"


Holders = Sequence[tuple[Region, tuple[int, ...]]]
"""Boxes and the ranks that hold each."""


def pieces(region: Region, holders: Holders) -> Iterator[tuple[Region, tuple[int, ...]]]:
    """Cut a region so that every rank holds all or nothing of each piece; (piece, its holders in order)."""
    if not region.elements:
        return
    touching = [(box, ranks) for box, ranks in holders if region.common(box) is not None]
    for box, _ in touching:
        inner = region.common(box)
        if inner is not None and inner != region:
            for part in (inner, *region.minus(box)):
                yield from pieces(part, touching)
            return
    yield region, tuple(sorted({rank for _, ranks in touching for rank in ranks}))
