"""Carries a known way out: in its order as far as memory asks for that, and at the same time as far as it does not.

A group may overtake those before it if what is left of the way still fits after it, one step after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from nereus.core import EMU, ModelStage
from nereus.transition.decompose import Build
from nereus.transition.holders import Holder
from nereus.transition.lead import Lead
from nereus.transition.run import Run

Way = list[Holder | Build]


def follow(run: Run, lead: Lead, builds: Iterable[Build]) -> None:
    """Go the way of `lead` before everything else; `builds` are all groups of the run."""
    named = {(build.goals[0].model_stage, frozenset(build.acquires)): build for build in builds}
    for unit in lead.offloaded:
        run.leaving.offload(run.holder(unit))
    way: Way = [run.holder(step) if isinstance(step, EMU) else named[step] for step in lead.steps]
    others = run.hold_back(way)
    while any(isinstance(step, Build) for step in way):
        if not _step(run, way):
            run.commit_next()
    run.queue(others)


def _step(run: Run, way: Way) -> bool:
    """Start the next group that can; after the first, one that may overtake."""
    going: list[Holder] = []
    first = True
    for index, step in enumerate(way):
        if isinstance(step, Holder):
            going.append(step)
            continue
        makes_room = first and _make_room(run, step, going)
        if run.idle(step) and (makes_room or (not first and _may_overtake(run, way, index, going))) and run.begin(step):
            del way[index]
            return True
        first = False
    return False


def _make_room(run: Run, build: Build, going: Sequence[Holder]) -> bool:
    """Let those leave that the group would read or whose memory it needs, if all that have to can."""
    if not all([_left(run, holder) for holder in going if holder.unit in build.sources]):
        return False
    for holder in going:
        short = run.room.short(build)
        if short and not short.keys().isdisjoint(holder.unit.devices):
            _left(run, holder)
    return not run.room.short(build)


def _may_overtake(run: Run, way: Way, index: int, going: Sequence[Holder]) -> bool:
    """Let those leave whose memory the group at `index` needs, if the way still fits when these and it go first."""
    build = way[index]
    assert isinstance(build, Build)
    short = run.room.short(build)
    if any(holder.unit in build.sources for holder in going):
        return False
    early = [h for h in going if not h.gone and not h.pending and not short.keys().isdisjoint(h.unit.devices)]
    ids = {id(holder) for holder in early}
    later = [step for step in way if id(step) not in ids]
    first = [*early, build, *(step for step in later if step is not build)]
    # What finds nothing to read now is overtaken in turn, and must not be counted on.
    return _fits(run, first) and (not early or _fits(run, [*early, *later])) and all([_left(run, h) for h in early])


def _fits(run: Run, way: Sequence[Holder | Build]) -> bool:
    """Whether steps fit one after another, and always leave a copy."""
    level, capacity = run.room.levels(), run.room.capacity
    copies = Counter[ModelStage]()
    for step in way:
        if isinstance(step, Build):
            copies[step.goals[0].model_stage] += len(step.goals)
            for device, size in step.acquires.items():
                if size and device in capacity:
                    level[device] += size
                    if level[device] > capacity[device]:
                        return False
        elif not step.gone:
            copies[step.unit.model_stage] -= 1
            if run.part(step.unit).alive + copies[step.unit.model_stage] < 1:
                return False
            for device, size in run.leaving.releases(step).items():
                if device in capacity:
                    level[device] -= size
    return True


def _left(run: Run, holder: Holder) -> bool:
    """Whether a unit has left, now that nobody who has started reads it any more."""
    if not holder.gone and not run.reading(holder) and run.part(holder.unit).spare:
        run.leaving.drop(holder)
    return holder.gone
