"""What moves where memory is short, over the least that any order moves and over what would with ample memory.

The planner's plans on 8 and 16 devices, each device with what the fuller of both plans needs and a part of their sum.
The least is that of a search over all orders; pairs on which it does not end are counted in the notes.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks._result import Result
from benchmarks.transitions._pairs import Pair, planned
from nereus.core import InfeasibleError, expand
from nereus.transition import Budget, connect, pair_bytes, place, stored_bytes
from nereus.transition.cheapest import cheapest
from nereus.transition.crowd import Crowd

DEVICES, SPARE = (8, 16), (0.1, 0.03, 0.0)
TRIES = 50_000


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one pair: with little memory, the least then (`proved`: or the best found), and with ample memory."""

    near: int
    least: int
    ample: int
    proved: bool


def lines(quick: bool) -> list[Result]:
    """The worst pair over the least, and over what moves with ample memory."""
    found: list[Moved] = []
    refused = 0
    for devices in DEVICES[:1] if quick else DEVICES:
        for pair in planned(devices, ("8b",) if quick else ("8b", "70b"), 1):
            for spare in SPARE:
                one = _moved(pair, spare)
                found.extend(one)
                refused += not one
    moving = [one for one in found if one.ample and one.near]
    short = [one for one in moving if one.near > one.ample]
    notes = f"{len(moving)} pairs, {len(short)} that give up units, {refused} refused"
    note = f"{notes}; least proved for {sum(one.proved for one in moving)}"
    return [
        _line("the least of any order", [one.near / one.least for one in moving], note),
        _line("with ample memory", [one.near / one.ample for one in moving], notes),
    ]


def _line(over: str, ratios: list[float], notes: str) -> Result:
    above = sum(ratio > 1 for ratio in ratios)
    told = f"{notes}; {above} above 1, mean {sum(ratios) / len(ratios):.3f}"
    return Result(f"moved near capacity / {over}, worst pair", "report", max(ratios), notes=told)


def _moved(pair: Pair, spare: float) -> list[Moved]:
    """One pair, or none where no order fits."""
    start = expand(pair.before)
    goal = place(start, pair.after, pair.schemas, pair.site)
    now, then = stored_bytes(start, pair.schemas), stored_bytes(goal, pair.schemas)
    capacity = {d: max(now[d], then[d]) + int(spare * (now[d] + then[d])) for d in {*now, *then}}
    sent: list[int] = []
    for budget in (Budget(capacity), None):
        try:
            dag = connect(start, goal, pair.schemas, budget, pair.site)
        except InfeasibleError:
            return []
        sent.append(sum(sum(pairs.values()) for pairs in pair_bytes(dag, pair.schemas).values()))
    best = cheapest(Crowd(start, goal, pair.schemas, capacity, {}), TRIES)
    least = sent[0] if best is None else min(sent[0], sent[1] + best.lost_bytes)
    return [Moved(sent[0], least, sent[1], best is not None and best.least)]
