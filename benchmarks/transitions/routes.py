"""CPU time in which one rank finds its own routes: a 70B model and its critic on 1,024 devices.

`python -m benchmarks.transitions --only routes`. What a worker does when a transition begins: the hash of all routes,
its own flows, a move for each tensor and kind of them, and the bytes of every pair. Nothing is kept from before.
"""

from __future__ import annotations

import time
from statistics import mean

from benchmarks._result import Result
from benchmarks.transitions._pairs import Pair, drawn, planned
from nereus.core import InfeasibleError, expand
from nereus.transition import connect, expand_flows, flows_of, pair_bytes, place
from nereus.transition.exchanges import exchanges_of
from nereus.transition.routes import fingerprint

DEVICES, DRAWN, LIMIT_S = 1024, 4, 1.0


def run(quick: bool = False) -> list[Result]:
    """The slowest pair; plans of the planner, and random ones."""
    devices = 64 if quick else DEVICES
    pairs = [*planned(devices, ("70b",), 1), *drawn(devices, DRAWN, models=("70b",))]
    found = [(pair.name, *one) for pair in pairs if (one := _of_one_rank(pair)) is not None]
    name, seconds, moves, tensors = max(found, key=lambda each: each[1])
    notes = (
        f"{len(found)} pairs, {len(pairs) - len(found)} have no order; mean {mean(each[1] for each in found):.2f} s; "
        f"slowest {name}: {moves:,} moves of the rank, {tensors:,} tensors in all"
    )
    return [
        Result(
            f"routes of one rank, CPU s, 70B on {devices:,} devices",
            f"<= {LIMIT_S:g}",
            seconds,
            met=seconds <= LIMIT_S,
            notes=notes,
            details={name: [seconds, moves] for name, seconds, moves, _ in found},
        )
    ]


def _of_one_rank(pair: Pair) -> tuple[float, int, int] | None:
    """CPU seconds, its moves, and the tensors of all model-stages that change; None where there is no order."""
    start = expand(pair.before)
    goal = place(start, pair.after, pair.schemas, pair.site)
    try:
        dag = connect(start, goal, pair.schemas, site=pair.site)
    except InfeasibleError:
        return None
    schemas = {ms: pair.schemas[ms] for ms in dag.goal.model_stages}
    devices = sorted(goal.devices)
    rank, moves = devices[len(devices) // 2], 0
    exchanges_of.forget()
    began_s = time.process_time()
    fingerprint(dag, schemas)
    for ms, schema in schemas.items():
        moves += sum(len(expand_flows(flows, schema)) for flows in flows_of(dag, ms, schema, rank).values())
    pair_bytes(dag, schemas)
    return time.process_time() - began_s, moves, sum(len(schema.tensors) for schema in schemas.values())
