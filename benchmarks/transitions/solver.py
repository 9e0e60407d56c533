"""Ours beside SCIP: the order of the same commit groups as a mixed-integer program, and every order of small ones.

`python -m benchmarks.transitions --only solver`; `python -m benchmarks.transitions.solver --limit 60` gives SCIP as
many CPU seconds a case. Cases are those of the part `schedule` in which the paper's rule does not meet the lower bound.
SCIP gets the commit groups as they are decomposed, and the longer of ours and the rule's order as its horizon. Where
memory allows no order of these groups it gets them a second time, old units that leave no room beside them given up
before: ours may do either, unit by unit. That it finds nothing in its time is an answer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from statistics import mean

from rich.console import Console
from tests.oracles.scip_orders import Answer, solve

from benchmarks._parts import table
from benchmarks._result import Result
from benchmarks.transitions.schedule import Case, Spans, moving_ranges, of_the_planner, spans
from nereus.core import EMU, ModelStage
from nereus.transition import stored_bytes
from nereus.transition.decompose import LocalDAG, decompose

POOLS = {32: 2, 64: 2, 128: 1, 256: 1, 512: 1, 1024: 1}
"""Devices → cases of each kind."""
LIMIT_S = 10.0
"""CPU seconds a case."""


def run(quick: bool = False, limit_s: float | None = None) -> list[Result]:
    """One line a pool."""
    import pyscipopt  # noqa: F401  that it is missing is said before anything is planned

    if quick:
        return [_pool(32, 1, 1.0)]
    return [_pool(devices, count, LIMIT_S if limit_s is None else limit_s) for devices, count in POOLS.items()]


def cases(devices: int, count: int) -> Iterable[Case]:
    """The first of each kind."""
    kinds = (of_the_planner(devices, 1, False), of_the_planner(devices, 1, True), moving_ranges(devices, 20))
    for kind in kinds:
        yield from islice((case for case in kind if _matters(spans(case))), count)


def _matters(found: Spans) -> bool:
    """Whether there is an order, and the rule's is not known to be the shortest."""
    return found.ours is not None and (found.paper is None or found.paper > found.bound)


def _pool(devices: int, count: int, limit_s: float) -> Result:
    solved = [_both(case, limit_s) for case in cases(devices, count)]
    found = [(ours, answer) for ours, answer, _ in solved if ours.ours and answer.span_bytes < float("inf")]
    ratios = [ours.ours / answer.span_bytes for ours, answer in found if ours.ours]
    bounds = [(ours.bound, answer.bound_bytes) for ours, answer, _ in solved]
    proved = sum(answer.status in ("optimal", "infeasible") for _, answer, _ in solved)
    unbuilt = sum(answer.status == "not built" for _, answer, _ in solved)
    sizes = [answer.binaries for _, answer, _ in solved]
    ours_s, its_s = mean(took_s for *_, took_s in solved), mean(answer.solve_s for _, answer, _ in solved)
    notes = (
        f"{len(solved)} cases, SCIP finds an order in {len(found)}, ends its search in {proved}, {unbuilt} too large "
        f"to be written down; its bound is the higher one in {sum(its > mine for mine, its in bounds)}, ours in "
        f"{sum(mine > its for mine, its in bounds)}; ours {ours_s * 1e3:.1f} ms, SCIP {its_s:.1f} s of {limit_s:g}; "
        f"{min(sizes):,} to {max(sizes):,} binaries"
    )
    details = {
        ours.name: {
            "ours": ours.ours, "bound": ours.bound, "ours_s": took_s, "scip": answer.span_bytes,
            "scip_bound": answer.bound_bytes, "scip_s": answer.solve_s, "status": answer.status,
            "binaries": answer.binaries, "constraints": answer.constraints,
        }
        for ours, answer, took_s in solved
    }  # fmt: skip
    ratio = mean(ratios) if ratios else float("nan")
    name = f"makespan, ours / SCIP where it finds an order, {devices} devices"
    return Result(name, "report", ratio, notes=notes, details=details)


def _both(case: Case, limit_s: float) -> tuple[Spans, Answer, float]:
    began_s = time.process_time()
    ours = spans(case)
    took_s = time.process_time() - began_s
    used = stored_bytes(case.start, case.schemas)
    horizon = max(ours.ours or 0.0, ours.paper or 0.0)
    groups = _decomposed(case, ())
    answer = solve(groups, used, case.capacity, horizon, limit_s)
    if answer.status == "infeasible":
        answer = solve(_decomposed(case, _in_the_way(groups, used, case)), used, case.capacity, horizon, limit_s)
    return ours, answer, took_s


def _decomposed(case: Case, unread: Collection[EMU]) -> Sequence[LocalDAG]:
    """The groups of every model-stage that changes."""
    return [
        decompose(case.start.of(ms), case.goal.of(ms), case.schemas[ms], unread)
        for ms in case.goal.model_stages
        if set(case.start.of(ms)) != set(case.goal.of(ms))
    ]


def _in_the_way(groups: Sequence[LocalDAG], used: Mapping[int, int], case: Case) -> set[EMU]:
    """Old units on whose devices there is no room for what takes over from them, even if all others have left."""
    room = {device: size - used.get(device, 0) for device, size in case.capacity.items()}
    held: dict[tuple[ModelStage, int], tuple[EMU, int]] = {}
    for local in groups:
        for unit in local.left:
            for device, size in zip(unit.devices, local.pricing.stored(unit.layout), strict=True):
                held[local.model_stage, device] = unit, size
                room[device] += size
    found = set[EMU]()
    for local in groups:
        for build in local.builds:
            for device, wanted in build.acquires.items():
                unit_size = held.get((local.model_stage, device))
                if unit_size is not None and wanted + unit_size[1] > room[device]:
                    found.add(unit_size[0])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transitions.solver", description=__doc__)
    parser.add_argument("--limit", type=float, default=60.0, help="CPU seconds a case")
    limit = parser.parse_args().limit
    Console(width=170).print(table(f"SCIP with {limit:g} s", run(limit_s=limit)))
