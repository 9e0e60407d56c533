"""Overlap trials (the paper's §7.4.4): two model-stages that move onto each other's devices. Draws them; no engine.

A device has room for one unit's share. A trial is drawn as a walk of single steps, each of which memory allows and none
of which destroys a last copy; so an order in which it can be done exists, and no step of it is undone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from nereus.core import EMU, EMUSet, Layout, ModelStage, Stage

ACTOR, ACTOR_GENERATION = ModelStage("actor", Stage.TRAINING), ModelStage("actor", Stage.GENERATION)
CRITIC, REWARD = ModelStage("critic", Stage.TRAINING), ModelStage("reward", Stage.INFERENCE)


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the paper's Table 5, on fewer devices."""

    name: str
    model_stages: tuple[ModelStage, ModelStage]
    devices: int


KINDS = (
    Kind("same model, other stage", (ACTOR, ACTOR_GENERATION), 4),
    Kind("other model, same stage", (ACTOR, CRITIC), 6),
    Kind("other model, other stage", (ACTOR, REWARD), 6),
)
LAUNCH_S = 0.2
MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class Trial:
    """From which units to which, and when each model-stage's change is called for."""

    start: EMUSet
    goal: EMUSet
    launch_s: Mapping[ModelStage, float]
    seed: int


def drawn(kind: Kind, seed: int) -> Trial:
    """Walks until both model-stages stand on devices that were the other's."""
    rng = random.Random(f"{kind.name} {seed}")
    while True:
        start = _start(rng, kind)
        goal = _walk(rng, kind, start)
        if goal is not None:
            launch_s = {ms: rng.uniform(0.0, LAUNCH_S) for ms in kind.model_stages}
            return Trial(EMUSet(tuple(start)), EMUSet(tuple(goal)), launch_s, seed)


def _start(rng: random.Random, kind: Kind) -> list[EMU]:
    """Two units each, on shuffled devices; the rest are free."""
    devices = rng.sample(range(kind.devices), kind.devices)
    found = []
    degrees = rng.choice([(1, 1), (1, 2), (2, 1)] if kind.devices >= 6 else [(1, 1)])
    for model_stage, tp in zip(kind.model_stages, degrees, strict=True):
        for _ in range(2):
            unit, devices = tuple(devices[:tp]), devices[tp:]
            found.append(EMU(model_stage, Layout(tp, 1), unit))
    return found


def _walk(rng: random.Random, kind: Kind, start: list[EMU]) -> list[EMU] | None:
    first = {
        ms: {device for unit in start if unit.model_stage == ms for device in unit.devices} for ms in kind.model_stages
    }
    now = list(start)
    one, other = kind.model_stages
    for _ in range(MOST_STEPS):
        free = set(range(kind.devices)) - {device for unit in now for device in unit.devices}
        model_stage = rng.choice(kind.model_stages)
        mine = [unit for unit in now if unit.model_stage == model_stage]
        old = [unit for unit in mine if unit in start]
        room = sorted(free - first[model_stage])
        if rng.random() < 0.5:
            if old and len(mine) > 1:
                now.remove(rng.choice(old))
        elif len(room) >= mine[0].layout.size:
            now.append(EMU(model_stage, mine[0].layout, tuple(rng.sample(room, mine[0].layout.size))))
        if _stands_on(now, one, first[other]) and _stands_on(now, other, first[one]):
            return now
    return None


def _stands_on(units: list[EMU], model_stage: ModelStage, devices: set[int]) -> bool:
    return any(devices & set(unit.devices) for unit in units if unit.model_stage == model_stage)
