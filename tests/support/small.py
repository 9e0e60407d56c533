"""Small transitions: three model-stages that every power of two cuts evenly, few devices, little memory to spare."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from nereus.core import (
    Cluster,
    Device,
    DeviceKind,
    EMUSet,
    Layout,
    Link,
    ModelStage,
    Plan,
    StateSchema,
    expand,
)
from nereus.transition import stored_bytes
from tests.support.models import ACTOR, REWARD, ROLLOUT, TRAINED, assign, even, plan


def three(rows: int = 16) -> dict[ModelStage, StateSchema]:
    """Three model-stages of four layers, one of each stage; each TP degree that divides `rows` cuts them evenly."""
    return {
        ROLLOUT: even(layers=4, rows=rows, columns=2),
        REWARD: even(layers=4, rows=rows, columns=3),
        ACTOR: even(layers=4, rows=rows, columns=1, kinds=TRAINED),
    }


SCHEMAS = three()
DEGREES = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1))
"""(tp, pp) of random layouts."""
NODES = {device: device // 4 for device in range(16)}
CLUSTER = Cluster(
    tuple(Device(device, node, "any") for device, node in NODES.items()),
    {"any": DeviceKind("any", 1, {}, 1.0)},
    {"intra": Link(1e6, 1e-5), "inter": Link(1e5, 1e-4)},
)


def full(*ends: EMUSet, schemas: Mapping[ModelStage, StateSchema] = SCHEMAS) -> dict[int, int]:
    """Device → as much memory as the fuller of the ends needs."""
    held = [stored_bytes(end, schemas) for end in ends]
    return {device: max(each[device] for each in held) for device in dict.fromkeys(d for each in held for d in each)}


def random_plan(rng: random.Random, model_stages: Sequence[ModelStage], devices: int) -> Plan:
    """Layouts and devices drawn at random; the model-stages may meet on devices."""
    chosen = []
    for ms in model_stages:
        tp, pp = rng.choice([each for each in DEGREES if each[0] * each[1] <= devices])
        pool = rng.sample(range(devices), devices)
        dp = rng.randint(1, min(devices // (tp * pp), 4 if devices <= 6 else 2))
        chosen.append(assign(ms, Layout(tp, pp), *pool[: dp * tp * pp]))
    return plan(*chosen)


def random_case(seed: int) -> tuple[EMUSet, EMUSet, dict[int, int]]:
    """Two sets of units and little more memory than they need."""
    rng = random.Random(seed)
    devices, model_stages = rng.choice([2, 3, 4, 5, 6, 8, 12, 16]), rng.sample(list(SCHEMAS), rng.randint(1, 3))
    start, goal = (expand(random_plan(rng, model_stages, devices)) for _ in range(2))
    slack = rng.choice([1.0, 1.0, 1.05, 1.25, 1.5])
    return start, goal, {device: int(slack * size) for device, size in full(start, goal).items()}
