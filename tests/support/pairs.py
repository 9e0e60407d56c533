"""Random plans on random pools: what the planner can produce, and more."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial

from nereus.core import Assignment, Candidate, Layout, ModelStage, Plan, StateSchema
from tests.support.models import ACTOR, CRITIC, FROZEN, REWARD, ROLLOUT, decoder


def random_schemas(rng: random.Random) -> dict[ModelStage, StateSchema]:
    """One to three model-stages with tied, untied and scalar heads, odd vocabularies and few KV heads."""
    layers, kv_heads = rng.choice([2, 3, 4, 5, 7]), rng.choice([1, 2, 4])
    vocab, tied = rng.choice([16, 17, 31]), rng.random() < 0.5
    sized = partial(decoder, layers=layers, kv_heads=kv_heads, vocab=vocab)
    schemas = {
        ACTOR: sized(tied=tied),
        ROLLOUT: sized(tied=tied, dtypes=FROZEN),
        CRITIC: sized(scalar=True),
        REWARD: sized(scalar=True, dtypes=FROZEN),
    }
    return {ms: schemas[ms] for ms in rng.sample(list(schemas), rng.randint(1, 3))}


def random_assignment(
    rng: random.Random, ms: ModelStage, layers: int, pool: Sequence[int], other_than: Layout | None = None
) -> Assignment:
    """A random layout, DP degree and choice of devices; with `other_than`, other TP or PP degrees if there are any."""
    degrees = [
        (tp, pp)
        for tp in (1, 2, 3, 4, 8)
        for pp in range(1, min(layers, 4) + 1)
        if tp * pp <= len(pool) and (other_than is None or (tp, pp) != (other_than.tp, other_than.pp))
    ]
    tp, pp = rng.choice(degrees or [(1, 1)])
    layout = Layout(tp, pp, _uneven(rng, layers, pp) if rng.random() < 0.3 else None)
    dp = rng.randint(1, len(pool) // layout.size)
    devices = rng.sample(list(pool), dp * layout.size)
    if rng.random() < 0.5:
        devices.sort()
    placed = tuple(tuple(devices[i : i + layout.size]) for i in range(0, len(devices), layout.size))
    return Assignment(Candidate(ms, layout, dp), placed)


def random_plan(
    rng: random.Random, schemas: Mapping[ModelStage, StateSchema], pool: Sequence[int], other_than: Plan | None = None
) -> Plan:
    """One assignment per model-stage; with `other_than`, four in five change TP or PP, others may change DP alone."""
    chosen: list[Assignment] = []
    for ms, schema in schemas.items():
        before = other_than.of(ms) if other_than is not None and rng.random() < 0.9 else None
        layout = None if before is None else before.candidate.layout
        chosen.append(random_assignment(rng, ms, schema.layers, pool, layout))
    return Plan(tuple(chosen))


def changes_degrees(before: Plan, after: Plan) -> bool:
    """Whether any model-stage changes its TP or PP."""
    return any(
        (a.candidate.layout.tp, a.candidate.layout.pp) != (b.candidate.layout.tp, b.candidate.layout.pp)
        for a in before.assignments
        for b in [after.of(a.candidate.model_stage)]
    )


def _uneven(rng: random.Random, layers: int, pp: int) -> tuple[int, ...]:
    cuts = sorted(rng.sample(range(1, layers), pp - 1))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True))
