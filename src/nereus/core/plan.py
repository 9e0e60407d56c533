"""A plan: one placed candidate per model-stage (S = {π_M}, paper §4.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from nereus.core.errors import SettingsError
from nereus.core.layout import Layout
from nereus.core.model_stage import ModelStage

LISTED = 16
"""A pool of up to so many devices is small enough to name every one."""
RECOMPUTE = ("none", "selective", "full")
"""What a candidate may recompute of its activations in the backward pass, from little to much."""
FEW = 8
"""Up to so many devices are listed one by one, more of them as ranges."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """How one model-stage could run, not yet placed. `micro_batch` is in sequences."""

    model_stage: ModelStage
    layout: Layout
    dp: int
    micro_batch: int = 1
    recompute: str = "none"
    kv_bytes: int = 0
    offload: bool = False
    zero: int = 0
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    vpp: int = 1
    precision: str = ""
    """What its matrix products run in, such as fp8; empty: what the workflow says."""

    def __post_init__(self) -> None:
        for name in ("dp", "micro_batch", "cp", "ep", "vpp"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{self.model_stage}: {name} {getattr(self, name)} must be at least 1")
        if self.recompute not in RECOMPUTE:
            raise SettingsError(f"{self.model_stage}: recompute {self.recompute!r}, valid: {', '.join(RECOMPUTE)}")

    @property
    def devices(self) -> int:
        """Number of devices it needs."""
        return self.dp * self.layout.size * self.cp

    def __str__(self) -> str:
        return f"{self.model_stage} {self.layout} dp{self.dp} mb{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A candidate and the devices of each of its units, in (pp rank, cp rank, tp rank) order."""

    candidate: Candidate
    units: tuple[tuple[int, ...], ...]
    devices: frozenset[int] = field(init=False, repr=False, compare=False)
    """Every device of the model-stage."""

    def __post_init__(self) -> None:
        ms, layout, dp = self.candidate.model_stage, self.candidate.layout, self.candidate.dp
        if len(self.units) != dp:
            raise SettingsError(f"{ms}: dp {dp} needs {dp} units, got {len(self.units)}")
        size = layout.size * self.candidate.cp
        if set(map(len, self.units)) != {size}:
            odd = next(unit for unit in self.units if len(unit) != size)
            raise SettingsError(f"{ms}: a unit of {layout} needs {size} devices, got {list(odd)}")
        object.__setattr__(self, "devices", frozenset[int]().union(*self.units))
        if len(self.devices) < size * dp:
            counts = Counter(device for unit in self.units for device in unit)
            twice = sorted(device for device, count in counts.items() if count > 1)
            raise SettingsError(f"{ms}: devices {twice} are in two concurrent units or twice in one")


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of the pool that a set of model-stages has to itself (D7.5)."""

    model_stages: frozenset[ModelStage]
    devices: frozenset[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """One assignment per model-stage. Model-stages that share a device take turns on it."""

    assignments: tuple[Assignment, ...]
    partitions: tuple[Partition, ...] = ()

    def __post_init__(self) -> None:
        stages = [a.candidate.model_stage for a in self.assignments]
        if len(set(stages)) != len(stages):
            raise SettingsError(f"plan: a model-stage is assigned twice: {[str(ms) for ms in stages]}")
        for index, partition in enumerate(self.partitions):
            for other in self.partitions[index + 1 :]:
                if partition.devices & other.devices:
                    raise SettingsError(f"plan: partitions share devices {sorted(partition.devices & other.devices)}")
            for a in self.assignments:
                inside = a.candidate.model_stage in partition.model_stages
                if inside and not a.devices <= partition.devices:
                    outside = sorted(a.devices - partition.devices)
                    raise SettingsError(f"plan: {a.candidate.model_stage} uses {outside} outside its partition")

    def of(self, model_stage: ModelStage) -> Assignment:
        """The assignment of a model-stage. Raises KeyError when the plan has none."""
        for assignment in self.assignments:
            if assignment.candidate.model_stage == model_stage:
                return assignment
        raise KeyError(str(model_stage))

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        """In stage order."""
        return tuple(sorted((a.candidate.model_stage for a in self.assignments), key=lambda ms: ms.sort_key))

    @property
    def devices(self) -> frozenset[int]:
        """Every device in use."""
        return frozenset[int]().union(*(a.devices for a in self.assignments))

    def describe(self) -> str:
        """One line: the layout of each model-stage."""
        parts = []
        for ms in self.model_stages:
            a = self.of(ms)
            parts.append(f"{ms} {a.candidate.layout} dp{a.candidate.dp} [{listed(a.devices)}]")
        return "; ".join(parts)


def listed(devices: Iterable[int]) -> str:
    """`0,1,4` of few devices, `0-15, 32-47` of many."""
    numbers = sorted(devices)
    return ",".join(map(str, numbers)) if len(numbers) <= FEW else ranges(numbers)


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 6, 8-9`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def numbers(text: str) -> list[int]:
    """Of `0-3, 6`. Raises ValueError for what are no numbers or rising ranges, and for more than `MOST_NUMBERS`."""
    found: list[int] = []
    for part in filter(None, map(str.strip, text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is neither a number nor a range")
        span = range(int(first), int(last or first) + 1)
        if not 1 <= span.stop - span.start <= MOST_NUMBERS - len(found):
            raise ValueError(f"{part!r} must rise, and there may be at most {MOST_NUMBERS:,} numbers")
        found += span
    return found


MOST_NUMBERS = 1 << 20
