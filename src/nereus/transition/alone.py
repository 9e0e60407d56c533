"""What every order loses at least: the sum over devices of what each would lose if it were the only one that is short.

On one device alone, an old unit and the goal unit of its model-stage are there, or one of them, or neither. Every byte
that a goal unit receives more is counted on the device that receives it, so the sum is below what any order loses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from math import inf

from nereus.transition.crowd import Crowd

Changes = tuple[tuple[int, int, int, int], ...]
"""By model-stage: bytes stored before and after, shared by both, and read by the second of the first."""
OLD, NONE, NEW = 0, 1, 2
"""What a device has of a model-stage."""


class Alone:
    """Bounds for the states of one crowd."""

    def __init__(self, crowd: Crowd) -> None:
        changes: dict[int, list[tuple[int, int, int, int]]] = {device: [] for device in crowd.tight}
        bits: dict[int, list[tuple[int, int]]] = {device: [] for device in crowd.tight}
        for new in crowd.new:
            for device, size in new.stored.items():
                old, shared = new.shared.get(device, (0, 0))
                before = crowd.old[old.bit_length() - 1].stored.get(device, 0) if old else 0
                changes[device].append((before, size, shared, new.held.get(device, 0)))
                bits[device].append((old, new.bit))
        self._places = [
            (tuple(bits[d]), _costs(tuple(changes[d]), crowd.tight[d] - crowd.kept[d]))
            for d in crowd.tight
            if any(held for *_, held in changes[d])
        ]

    def lost(self, alive: int, built: int) -> float:
        """The least that is lost from a state on."""
        return sum(
            cost(tuple([NEW if new & built else OLD if old & alive else NONE for old, new in bits]))
            for bits, cost in self._places
        )


@lru_cache(maxsize=256)
def _costs(changes: Changes, room: int) -> Callable[[tuple[int, ...]], float]:
    @cache
    def cost(state: tuple[int, ...]) -> float:
        """The least loss until every goal unit is there."""
        both = list(zip(changes, state, strict=True))
        level = sum(each[0] if has == OLD else each[1] if has == NEW else 0 for each, has in both)
        best = 0.0 if all(has == NEW for has in state) else inf
        for index, ((_, after, shared, held), has) in enumerate(both):
            rest = state[:index], state[index + 1 :]
            if has != NEW:
                wanted = after - (shared if has == OLD else 0)
                if not wanted or level + wanted <= room:
                    best = min(best, cost((*rest[0], NEW, *rest[1])))
            if has == OLD and best > held:
                best = min(best, held + cost((*rest[0], NONE, *rest[1])))
        return best

    return cost
