"""Plans that the tests on real processes share."""

from __future__ import annotations

from tests.support.plans import Degrees

ALONE: dict[str, Degrees] = {
    "actor/generation": (1, 1, 1, (0,)),
    "reference/inference": (1, 1, 1, (0,)),
    "reward/inference": (1, 1, 1, (0,)),
    "actor/training": (1, 1, 1, (0,)),
    "critic/training": (1, 1, 1, (0,)),
}
PAIR: dict[str, Degrees] = {
    **ALONE,
    "actor/generation": (1, 1, 2, (0, 1)),
    "actor/training": (1, 1, 1, (0,)),
    "critic/training": (1, 1, 1, (1,)),
}
"""Actor and critic are trained at the same time."""
SPREAD: dict[str, Degrees] = {
    "actor/generation": (2, 1, 2, (0, 1, 2, 3)),
    "reference/inference": (1, 2, 1, (0, 1)),
    "reward/inference": (2, 1, 1, (2, 3)),
    "actor/training": (2, 2, 1, (0, 1, 2, 3)),
    "critic/training": (1, 1, 3, (1, 2, 3)),
}
