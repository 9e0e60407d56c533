"""What transitions move over the least that they could (M*), planned for random pairs of layouts.

Each pair is planned twice: positions dealt over all devices, against M*; and kept together as the plan puts them on
nodes of eight, against the least under that constraint and against M*. Near capacity, the planner's pairs against the
least that any order moves. `python -m benchmarks.transitions --only bytes`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks._result import Result
from benchmarks.transitions._near_capacity import lines as near_capacity
from nereus.core import Assignment, Candidate, EMUSet, Layout, ModelSpec, ModelStage, Plan, StateSchema, expand
from nereus.cost.state import schema
from nereus.transition import connect, minimum_bytes, pair_bytes, place
from nereus.transition.minimum import minimum_on_nodes
from nereus.transition.site import Site

PAIRS, NODE = 1200, 8
"""Of each kind of model."""
POOLS = (8, 16, 24, 32, 48, 64)
MS = ModelStage.parse("actor/training")
EVEN = ((1, 2, 4, 8), (1, 2, 4, 8))
UNEVEN = ((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 5, 7))
"""TP and PP degrees that are drawn from."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one pair."""

    anywhere: int
    least: int
    on_nodes: int
    least_on_nodes: int


def even(rng: random.Random) -> StateSchema:
    """Every degree of `EVEN` divides every size: no padding, no replicated heads, embeddings apart."""
    heads = rng.choice((8, 16))
    spec = ModelSpec("llama", rng.choice((8, 16, 24)), heads * 8, heads, heads, 8, heads * 24, 64 * rng.choice((5, 20)))
    return schema(spec, rng.random() < 0.7)


def uneven(rng: random.Random) -> StateSchema:
    """Few KV heads, padded vocabularies, tied embeddings, layers and widths that do not divide."""
    kv_heads = rng.choice((1, 2, 4))
    heads = kv_heads * rng.choice((2, 3, 4))
    heads = heads if heads >= 8 else 8
    family, tied = rng.choice((("llama", False), ("qwen2", True), ("qwen3", True), ("qwen2", False)))
    spec = ModelSpec(
        family, rng.choice((7, 10, 13, 22)), heads * 8, heads, kv_heads, 8, rng.choice((200, 333, 410)),
        rng.choice((257, 1001, 1500)), tied_embeddings=tied, qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
    )  # fmt: skip
    return schema(spec, rng.random() < 0.7)


def drawn(rng: random.Random, layers: int, degrees: Sequence[Sequence[int]], pool: Sequence[int]) -> Plan:
    """One model-stage in a random layout on a random part of the pool, units on runs of devices."""
    tp, pp = (rng.choice(each) for each in degrees)
    pp = min(pp, layers, max(1, len(pool) // tp))
    layout = Layout(min(tp, len(pool)), pp)
    dp = rng.randint(1, len(pool) // layout.size)
    first = rng.randint(0, len(pool) - dp * layout.size)
    devices = pool[first : first + dp * layout.size]
    units = tuple(tuple(devices[i : i + layout.size]) for i in range(0, len(devices), layout.size))
    return Plan((Assignment(Candidate(MS, layout, dp), units),))


def moved(before: Plan, after: Plan, held: StateSchema, node_of: Mapping[int, int]) -> Moved:
    """What is planned to move, and the least."""
    start, schemas = expand(before), {MS: held}
    goals = [place(start, after, schemas), place(start, after, schemas, Site(node_of))]
    anywhere, on_nodes = (_sent(start, goal, schemas, node_of) for goal in goals)
    (wanted,) = expand(after).blocks(MS)
    return Moved(
        anywhere,
        minimum_bytes(held, start.blocks(MS), goals[0].blocks(MS)),
        on_nodes,
        minimum_on_nodes(held, start.blocks(MS), wanted, node_of),
    )


def _sent(start: EMUSet, goal: EMUSet, schemas: Mapping[ModelStage, StateSchema], node_of: Mapping[int, int]) -> int:
    dag = connect(start, goal, schemas, site=Site(node_of))
    return sum(sum(pairs.values()) for pairs in pair_bytes(dag, schemas).values())


def pairs(make: Callable[[random.Random], StateSchema], degrees: Sequence[Sequence[int]], count: int) -> list[Moved]:
    """Random pairs; those that have to move nothing anyhow are not counted."""
    rng, found = random.Random(0), list[Moved]()
    while len(found) < count:
        held = make(rng)
        pool = range(rng.choice(POOLS))
        before, after = (drawn(rng, held.layers, degrees, pool) for _ in range(2))
        one = moved(before, after, held, {device: device // NODE for device in pool})
        if one.on_nodes or one.anywhere:
            found.append(one)
    return found


def _lines(name: str, limit: float, found: Sequence[Moved]) -> list[Result]:
    lines = []
    for where, ours, least, target in (
        ("M*", "anywhere", "least", True),
        ("M* that keeps nodes together", "on_nodes", "least_on_nodes", True),
        ("M*, nodes kept together", "on_nodes", "least", False),
    ):
        ratios = [_ratio(getattr(one, ours), getattr(one, least)) for one in found]
        over, worst = sum(ratio > limit for ratio in ratios), max(ratios)
        total = sum(getattr(one, ours) for one in found) / max(1, sum(getattr(one, least) for one in found))
        note = f"{len(found)} pairs, {over} above {limit}; all bytes together {total:.4f}"
        told = f"<= {limit}" if target else "report"
        met = worst <= limit if target else None
        lines.append(Result(f"moved / {where}, {name}, worst pair", told, worst, met=met, notes=note))
    return lines


def _ratio(ours: int, least: int) -> float:
    return ours / least if least else float("inf") if ours else 1.0


def run(quick: bool = False) -> list[Result]:
    """All lines."""
    count = 20 if quick else PAIRS
    divisible = pairs(even, EVEN, count)
    others = pairs(uneven, UNEVEN, count)
    near = near_capacity(quick)
    return [*_lines("divisible", 1.02, divisible), *_lines("uneven, GQA, tied", 1.05, others), *near]
