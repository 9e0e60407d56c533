"""Model-stages that wait for each other: a proof that no order exists, without looking at orders.

Until a model-stage has its first new unit, one of its old units stays. If none of several model-stages finds room for a
first unit beside what so stays, of each of them some unit, none ever does.
"""

from __future__ import annotations

from collections.abc import Collection

from nereus.transition.crowd import Crowd, Levels, Place, each


def deadlocked(crowd: Crowd) -> bool:
    """Whether some model-stages never get a first new unit. Nothing is staged in host memory."""
    goals: dict[int, list[Place]] = {}
    """Bits of the old units of a model-stage that keeps none, of which one stays → its goal units."""
    for new in crowd.new:
        if new.others and not next(each(crowd.old, new.others)).safe:
            goals.setdefault(new.others, []).append(new)
    while goals:
        ready = [olds for olds, own in goals.items() if any(_has_room(crowd, new, goals) for new in own)]
        if not ready:
            return True
        for olds in ready:
            del goals[olds]
    return False


def _has_room(crowd: Crowd, new: Place, waiting: Collection[int]) -> bool:
    """Whether a goal unit has room beside single old units of those that wait, and one of several of each other."""
    singles = sum(olds for olds in waiting if olds & (olds - 1) == 0)
    level = {device: crowd.kept[device] for device in new.stored}
    for old in each(crowd.old, singles):
        _put(level, old)
    return _fits(crowd, new, singles, level) and all(
        any(_fits(crowd, new, singles | old.bit, _put(dict(level), old)) for old in each(crowd.old, olds))
        for olds in waiting
        if not olds & singles
    )


def _put(level: Levels, old: Place) -> Levels:
    for device in level.keys() & old.stored.keys():
        level[device] += old.stored[device]
    return level


def _fits(crowd: Crowd, new: Place, alive: int, level: Levels) -> bool:
    wanted = crowd.wanted(new.bit, alive)
    return all(not size or level[device] + size <= crowd.tight[device] for device, size in wanted.items())
