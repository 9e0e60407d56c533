"""How long releases make groups wait at least: the last old unit of a model-stage leaves after the first new one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from nereus.core import EMU, ModelStage
from nereus.transition.demand import Stage


@dataclass(frozen=True, slots=True)
class _Wait:
    """How long a goal unit takes at least, as the first of its model-stage and at all, and the model-stages that have
    to have a new unit before, because all their old ones leave."""

    model_stage: ModelStage
    first: float
    received: float
    copied: frozenset[ModelStage]


@dataclass(frozen=True, slots=True)
class Releases:
    """`copied`: when each model-stage has its first new unit, at the earliest; `tails`: how long the span goes on after
    that, for those that keep no unit: whichever is the last to leave, what needs its room comes after. In bytes."""

    copied: Mapping[ModelStage, float]
    tails: Mapping[ModelStage, float]
    span: float
    """The least in which all groups find room."""


def releases_of(stages: Sequence[Stage]) -> Releases:
    """All model-stages together."""
    going = {
        stage.model_stage: sum(local.copies * len(local.left) for local in stage.parts)
        for stage in stages
        if not any(local.kept or local.elsewhere for local in stage.parts)
    }
    copied: dict[ModelStage, float] = {}
    waits, found = _waits(stages, going), 0.0
    for _ in range(len(stages) + 1):
        ends: dict[ModelStage, float] = {}
        for wait in waits:
            start = max((copied.get(other, 0.0) for other in wait.copied), default=0.0)
            ends[wait.model_stage] = min(start + wait.first, ends.get(wait.model_stage, start + wait.first))
            found = max(found, start + wait.received)
        copied = ends
    after = _after(stages)
    tails = {
        stage.model_stage: float(min(after.get(unit, 0) for local in stage.parts for unit in local.left))
        for stage in stages
        if stage.model_stage in copied and going.get(stage.model_stage)
    }
    return Releases(copied, tails, max([found, *copied.values(), *(copied[ms] + tail for ms, tail in tails.items())]))


def _waits(stages: Sequence[Stage], going: Mapping[ModelStage, int]) -> Set[_Wait]:
    """`going`: how many units of a model-stage leave that keeps none."""
    found: set[_Wait] = set()
    for stage in stages:
        senders = stage.holding
        plain = {(each.received_bytes, each.moved_bytes, each.alone): each for each in stage.demands if not each.gone}
        for demand in (*plain.values(), *(each for each in stage.demands if each.gone)):
            counts = Counter(unit.model_stage for unit in demand.gone)
            copied = frozenset(ms for ms, count in counts.items() if count == going.get(ms))
            times = (demand.lasts(senders), float(demand.received_bytes))
            found.add(_Wait(stage.model_stage, *times, copied))
    return found


def _after(stages: Sequence[Stage]) -> dict[EMU, int]:
    """Unit → the most that one of those receives which need it to leave."""
    found: dict[EMU, int] = defaultdict(int)
    for stage in stages:
        for demand in stage.demands:
            for unit in demand.gone:
                found[unit] = max(found[unit], demand.received_bytes)
    return found
