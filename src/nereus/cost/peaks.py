"""The peak of every device under a plan: idle co-residents and the largest transient of any call there (D7.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np

from nereus.core import Assignment, Plan
from nereus.core.sizes import show_bytes
from nereus.cost.rows import Ints

T = TypeVar("T")

MOST_GROUPS = 1 << 40
"""Numbers of groups beyond which they are counted through, so that they stay integers."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest use of one device: what is stored there, and the call that adds most, by term."""

    resident_bytes: int
    call: str
    terms: Mapping[str, int]

    @property
    def transient_bytes(self) -> int:
        """Bytes of the call's terms."""
        return sum(self.terms.values())

    @property
    def bytes(self) -> int:
        """The peak."""
        return self.resident_bytes + self.transient_bytes

    def describe(self) -> str:
        """The call and the term that make the peak, in words."""
        term = max(self.terms, key=self.terms.__getitem__, default="")
        stored = f"{show_bytes(self.resident_bytes)} stored"
        if not self.transient_bytes:
            return stored
        return f"{self.call}: {term} {show_bytes(self.terms[term])} of {show_bytes(self.transient_bytes)}, {stored}"


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one pp rank of a model-stage stores between calls, and what each of its calls adds, by term."""

    resident_bytes: int
    added: Mapping[str, Mapping[str, int]]

    @property
    def bytes(self) -> int:
        """What it comes to alone on a device."""
        return self.resident_bytes + max((sum(terms.values()) for terms in self.added.values()), default=0)


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks of a plan's devices, in order: `group` numbers for each the one of `found` that it shares."""

    devices: Ints
    group: Ints
    found: tuple[Peak, ...]

    def each(self, value: Callable[[Peak], T]) -> dict[int, T]:
        """A value of every device's peak."""
        values = [value(peak) for peak in self.found]
        return {device: values[index] for device, index in zip(self.devices.tolist(), self.group.tolist(), strict=True)}


def peaks(plan: Plan, footprints: Callable[[Assignment], tuple[Footprint, ...]]) -> Peaks:
    """The peak of every device; `footprints` gives a model-stage's memory by pp rank.

    Devices on which the same pp ranks of the same model-stages lie are counted once.
    """
    units = [np.fromiter(chain.from_iterable(each.units), dtype=np.int64) for each in plan.assignments]
    first, last = min(int(flat.min()) for flat in units), max(int(flat.max()) for flat in units)
    used = np.zeros(last - first + 1, dtype=np.bool_)
    for flat in units:
        used[flat - first] = True
    devices, index = first + np.flatnonzero(used), np.cumsum(used) - 1
    ranks = [
        _ranks(each, index[flat - first], len(devices)) for each, flat in zip(plan.assignments, units, strict=True)
    ]
    group = np.zeros(len(devices), dtype=np.int64)
    for rank in ranks:
        group = group * (int(rank.max()) + 2) + rank + 1
        if int(group.max()) > MOST_GROUPS:
            group = np.unique(group, return_inverse=True)[1].reshape(-1)
    _, examples, group = np.unique(group, return_index=True, return_inverse=True)
    memory = [footprints(assignment) for assignment in plan.assignments]
    found = [
        _peak([each[rank[example]] for each, rank in zip(memory, ranks, strict=True) if rank[example] >= 0])
        for example in examples
    ]
    return Peaks(devices, group.reshape(-1), tuple(found))


def _ranks(assignment: Assignment, where: Ints, count: int) -> Ints:
    """The pp rank that each of `count` devices has in a model-stage, -1 where it has none; `where` its units lie."""
    found = np.full(count, -1, dtype=np.int64)
    size, pp = len(assignment.units[0]), assignment.candidate.layout.pp
    found[where] = np.tile(np.arange(size) // (size // pp), len(assignment.units))
    return found


def _peak(together: Sequence[Footprint]) -> Peak:
    calls = [(name, terms) for each in together for name, terms in each.added.items()]
    call, terms = max(calls, key=lambda entry: sum(entry[1].values()), default=("", {}))
    return Peak(sum(each.resident_bytes for each in together), call, terms)
