"""The cuts of the pool that the search tries (D7.5): which window of devices each model-stage may use.

- Each stage has the whole pool, or everything left or right of one cut: colocated is the case without a cut,
  generation | rest one of the others. Three stages may also have a third each.
- Inside a window the models of one stage take turns on all of it, or groups of them have disjoint parts.

A model-stage uses the front of its window. Pinned devices are a window of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

from nereus.core import Capabilities, ModelStage, Partition, Stage

EXACT_CUTS = 16
"""Up to so many devices a window may end anywhere; larger pools are cut at sixteenths."""
MIXED_POOL = 4
"""Up to so many devices a stage with the whole pool may go with stages that share it out."""

Window = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A window for each model-stage; `partitions` where the cut is clean."""

    windows: Mapping[ModelStage, Window]
    partitions: tuple[Partition, ...] = ()


def arrangements(model_stages: Sequence[ModelStage], pool: Window, capabilities: Capabilities) -> Iterator[Arrangement]:
    """Every arrangement tried, colocated ones first."""
    stages = tuple(dict.fromkeys(ms.stage for ms in model_stages))
    pinned = {ms: _pinned(capabilities, ms, pool) for ms in model_stages if capabilities.pin(ms).devices}
    seen: set[tuple[Window, ...]] = set()
    for by_stage in _stage_windows(stages, pool):
        members = [[ms for ms in model_stages if ms.stage is stage] for stage in stages]
        shared = [
            _shared_out(m, by_stage[stage], stage is not stages[-1]) for stage, m in zip(stages, members, strict=True)
        ]
        for parts in product(*shared):
            windows = {ms: window for part in parts for ms, window in part.items()} | pinned
            key = tuple(windows[ms] for ms in model_stages)
            if key not in seen:
                seen.add(key)
                yield Arrangement(windows, () if pinned else _partitions(model_stages, by_stage))


def _pinned(capabilities: Capabilities, model_stage: ModelStage, pool: Window) -> Window:
    wanted = set(capabilities.pin(model_stage).devices or ())
    return tuple(device for device in pool if device in wanted)


def _stage_windows(stages: Sequence[Stage], pool: Window) -> Iterator[dict[Stage, Window]]:
    yield dict.fromkeys(stages, pool)
    for cut in _cuts(len(pool)):
        left, right = pool[:cut], pool[cut:]
        choices = (left, right, pool) if len(pool) <= MIXED_POOL else (left, right)
        for windows in product(choices, repeat=len(stages)):
            if len(set(windows)) > 1 and {device for window in windows for device in window} == set(pool):
                yield dict(zip(stages, windows, strict=True))
    if len(stages) == 3:
        for first, second in combinations(_cuts(len(pool)), 2):
            yield dict(zip(stages, (pool[:first], pool[first:second], pool[second:]), strict=True))


def _shared_out(members: Sequence[ModelStage], window: Window, any_order: bool) -> Iterator[dict[ModelStage, Window]]:
    """Windows of the models of one stage: every way to form groups, every way to share the window out to them.

    In which order the groups lie matters only against other stages, so one stage may keep a fixed order.
    """
    for formed in _groupings(tuple(members)):
        for groups in permutations(formed) if any_order else [formed]:
            for ends in combinations(_cuts(len(window)), len(groups) - 1):
                bounds = (0, *ends, len(window))
                yield {
                    ms: window[bounds[index] : bounds[index + 1]] for index, group in enumerate(groups) for ms in group
                }


def _groupings(members: tuple[ModelStage, ...]) -> Iterator[list[list[ModelStage]]]:
    """Every set partition of `members`, all together first."""
    if len(members) <= 1:
        yield [list(members)]
        return
    for rest in _groupings(members[1:]):
        for index in range(len(rest)):
            yield [*rest[:index], [members[0], *rest[index]], *rest[index + 1 :]]
        yield [[members[0]], *rest]


def _cuts(size: int) -> list[int]:
    step = -(-size // EXACT_CUTS)
    return list(range(step, size, step))


def _partitions(model_stages: Sequence[ModelStage], by_stage: Mapping[Stage, Window]) -> tuple[Partition, ...]:
    """The parts of a clean cut; none when stages overlap without being equal."""
    parts = tuple(dict.fromkeys(by_stage.values()))
    if sum(map(len, parts)) != len({device for part in parts for device in part}):
        return ()
    return tuple(
        Partition(frozenset(ms for ms in model_stages if by_stage[ms.stage] == part), frozenset(part)) for part in parts
    )
