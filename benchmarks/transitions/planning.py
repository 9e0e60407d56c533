"""CPU time to plan a transition, by phase, over pairs of plans on 32 to 16,384 devices.

`python -m benchmarks.transitions --only planning`. Phases: place; connect (decompose, schedule, fit); estimate.
Least of a few repeats of each pair, process CPU time; a pair for which memory allows no way is counted with what it
took to say so. What is the same for every plan of a job (the tables of its tensors) has been made before. Parts that
are alike are ordered once; pairs whose units tie all devices together have no parts and are a line of their own, and so
is what the decision does not wait for: making the primitives of every part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TypeVar

from benchmarks._result import Result
from benchmarks.transitions._pairs import Pair, drawn, planned
from nereus.core import Calibration, EMUSet, InfeasibleError, Plan, TransitionDAG, TransitionEstimate, expand
from nereus.transition import connect, estimate, place, stored_bytes
from nereus.transition.budget import Budget
from nereus.transition.exchanges import exchanges_of

LIMITS_MS = {32: 5.0, 128: 5.0, 512: 5.0, 1024: 5.0, 16384: 100.0}
REPEATS = 3
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed:
    """One pair: CPU milliseconds by phase."""

    name: str
    place_ms: float
    connect_ms: float
    estimate_ms: float
    expand_ms: float = 0.0
    """To make all primitives and edges."""
    primitives: int = 0
    parts: int = 1
    """Parts that are ordered apart; those that are alike count as one."""
    folded: bool = False
    refused: str = ""

    @property
    def total_ms(self) -> float:
        """All phases."""
        return self.place_ms + self.connect_ms + self.estimate_ms


def timed(pair: Pair, repeats: int = REPEATS, near_capacity: bool = False) -> Timed:
    """One pair, warm; `near_capacity` leaves only what both plans need, and a tenth of the difference."""
    start = expand(pair.before)
    goal, place_ms = _least(lambda: _placed(pair, start, pair.after), repeats)
    capacity = dict(pair.capacity)
    if near_capacity:
        now, then = stored_bytes(start, pair.schemas), stored_bytes(goal, pair.schemas)
        capacity = {d: max(now[d], then[d]) + (now[d] + then[d]) // 10 for d in {*now, *then}}
    dag, connect_ms = _least(lambda: _connected(pair, start, goal, capacity), repeats)
    if isinstance(dag, InfeasibleError):
        return Timed(pair.name, place_ms, connect_ms, 0.0, refused=str(dag))
    _, estimate_ms = _least(lambda: _estimated(pair, dag), repeats)
    made, expand_ms = _least(lambda: len(dag.primitives), 1)
    parts = max(1, len(dag.lots))
    return Timed(pair.name, place_ms, connect_ms, estimate_ms, expand_ms, made, parts, bool(dag.lots))


def _placed(pair: Pair, start: EMUSet, plan: Plan) -> EMUSet:
    return place(start, plan, pair.schemas, pair.site)


def _connected(pair: Pair, start: EMUSet, goal: EMUSet, capacity: dict[int, int]) -> TransitionDAG | InfeasibleError:
    try:
        return connect(start, goal, pair.schemas, Budget(capacity), pair.site)
    except InfeasibleError as error:
        return error


def _estimated(pair: Pair, dag: TransitionDAG) -> TransitionEstimate:
    """Without what the last time has left behind."""
    exchanges_of.forget()
    return estimate(dag, pair.schemas, pair.cluster, Calibration())


def _least(work: Callable[[], T], repeats: int) -> tuple[T, float]:
    best = float("inf")
    for _ in range(repeats):
        began_s = time.process_time()
        found = work()
        best = min(best, time.process_time() - began_s)
    return found, 1e3 * best


def lines(devices: int, where: str, found: Sequence[Timed]) -> list[Result]:
    """The slowest pair beside the target, the means by phase in the notes; those without parts; all primitives."""
    name = f"plan a transition, CPU ms, {devices} devices, {where}"
    results = [_line(name, LIMITS_MS[devices], found)]
    whole = [each for each in found if not each.folded and not each.refused]
    parts = [each for each in found if each.folded]
    if whole and parts:
        results.append(_line(f"{name}, in one piece", LIMITS_MS[devices], whole))
        results.append(_line(f"{name}, in parts", LIMITS_MS[devices], parts))
    slowest = max(found, key=lambda each: each.expand_ms)
    note = f"not waited for by the decision; slowest {slowest.name}, {slowest.primitives} primitives"
    results.append(
        Result(f"make all primitives, CPU ms, {devices} devices, {where}", "", slowest.expand_ms, notes=note)
    )
    return results


def _line(name: str, limit_ms: float, found: Sequence[Timed]) -> Result:
    worst = max(found, key=lambda each: each.total_ms)
    refused = sum(bool(each.refused) for each in found)
    within = sum(each.total_ms <= limit_ms for each in found)
    note = (
        f"{len(found)} pairs, {within} within, {refused} refused, up to {max(each.primitives for each in found)} "
        f"primitives, {max(each.parts for each in found)} unlike parts; mean "
        f"{mean(each.total_ms for each in found):.1f} ms: place {mean(each.place_ms for each in found):.1f}, connect "
        f"{mean(each.connect_ms for each in found):.1f}, estimate {mean(each.estimate_ms for each in found):.1f}; "
        f"slowest {worst.name}: {worst.place_ms:.1f} + {worst.connect_ms:.1f} + {worst.estimate_ms:.1f}"
    )
    details = {each.name: [each.place_ms, each.connect_ms, each.estimate_ms] for each in found}
    return Result(name, f"<= {limit_ms:g}", worst.total_ms, met=worst.total_ms <= limit_ms, notes=note, details=details)


def run(quick: bool = False, pools: Iterable[int] = tuple(LIMITS_MS)) -> list[Result]:
    """All lines; `quick` keeps to the smallest pool."""
    found: list[Result] = []
    for devices in (32,) if quick else pools:
        large = devices > 1024
        repeats, models = (1, ("8b",)) if large else (REPEATS, ("8b", "70b"))
        pairs = list(planned(devices, ("8b",) if quick else models, 1))
        if pairs:
            found.extend(lines(devices, "the planner's plans", [timed(pair, repeats) for pair in pairs]))
            near = [timed(pair, repeats, near_capacity=True) for pair in pairs]
            found.extend(lines(devices, "the planner's plans, near capacity", near))
        if not large:  # no planner makes such plans, and of this size they take minutes
            others = drawn(devices, 2 if quick else 6)
            found.extend(lines(devices, "random plans", [timed(pair, 1) for pair in others]))
    return found
