"""The peak of every device under a plan: idle co-residents and the largest transient of any call there (D7.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from nereus.core import Assignment, Plan
from nereus.core.sizes import show_bytes
from nereus.cost.rows import Ints


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


def peaks(plan: Plan, footprints: Callable[[Assignment], tuple[Footprint, ...]]) -> dict[int, Peak]:
    """The peak of every device; `footprints` gives a model-stage's memory by pp rank.

    Devices on which the same pp ranks of the same model-stages lie are counted once and share one `Peak`.
    """
    devices = np.array(sorted(plan.devices), dtype=np.int64)
    ranks = [_ranks(assignment, devices) for assignment in plan.assignments]
    group = np.zeros(len(devices), dtype=np.int64)
    for rank in ranks:
        group = np.unique(group * (rank.max() + 2) + rank + 1, return_inverse=True)[1].reshape(-1)
    _, examples = np.unique(group, return_index=True)
    memory = [footprints(assignment) for assignment in plan.assignments]
    found = [
        _peak([each[rank[example]] for each, rank in zip(memory, ranks, strict=True) if rank[example] >= 0])
        for example in examples
    ]
    return {device: found[index] for device, index in zip(devices.tolist(), group.tolist(), strict=True)}


def _ranks(assignment: Assignment, devices: Ints) -> Ints:
    """The pp rank that each of the sorted `devices` has in a model-stage, -1 where it has none."""
    units = np.fromiter(chain.from_iterable(assignment.units), dtype=np.int64)
    found = np.full(len(devices), -1, dtype=np.int64)
    size, pp = len(assignment.units[0]), assignment.candidate.layout.pp
    found[np.searchsorted(devices, units)] = np.tile(np.arange(size) // (size // pp), len(assignment.units))
    return found


def _peak(together: Sequence[Footprint]) -> Peak:
    calls = [(name, terms) for each in together for name, terms in each.added.items()]
    call, terms = max(calls, key=lambda entry: sum(entry[1].values()), default=("", {}))
    return Peak(sum(each.resident_bytes for each in together), call, terms)
