"""Random transitions, executed in process and compared with the oracle bit for bit."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from nereus.core import (
    EMU,
    Destroy,
    EMUSet,
    InfeasibleError,
    ModelStage,
    Plan,
    StateSchema,
    TransitionDAG,
    expand,
)
from nereus.engine.transports.memory import execute
from nereus.transition import compile, fit, flows_of, moves_of, peak_bytes, stored_bytes
from nereus.transition.budget import Budget
from tests.oracles.cut import lacks_bytes
from tests.oracles.senders import least_busiest_sender
from tests.support.pairs import changes_degrees, random_plan, random_schemas
from tests.support.worlds import assert_holds, filled

PAIRS = 240
BATCH = 20


def random_pair(seed: int) -> tuple[dict[ModelStage, StateSchema], Plan, Plan]:
    """Schemas and two plans on pools of up to 10 devices that overlap, grow or shrink."""
    rng = random.Random(seed)
    schemas = random_schemas(rng)
    everyone = list(range(10))
    before, after = (rng.sample(everyone, rng.randint(1, 10)) for _ in range(2))
    start = random_plan(rng, schemas, before)
    return schemas, start, random_plan(rng, schemas, after, start)


def lacking(dag: TransitionDAG, schemas: dict[ModelStage, StateSchema]) -> Counter[int]:
    """What the oracle says each device must receive."""
    wanted: Counter[int] = Counter()
    for goal in dag.goal:
        if goal not in dag.start.units:
            for device in goal.devices:
                existing = dag.start.of(goal.model_stage)
                wanted[device] += lacks_bytes(schemas[goal.model_stage], existing, goal, device)
    return +wanted


def assert_last_copy_survives(dag: TransitionDAG) -> None:
    """At every Destroy, another unit of the model-stage exists whole or has been committed."""
    whole = set(dag.start)
    left = {name: len(steps) for name, steps in dag.groups.items()}
    goal = set(dag.goal)
    built: dict[str, set[EMU]] = {}
    for step in dag.primitives:
        if isinstance(step, Destroy):
            whole.remove(step.sources[0])
            assert any(unit.model_stage == step.model_stage for unit in whole), step.id
            continue
        built.setdefault(step.group, set()).update(goal.intersection(step.targets))
        left[step.group] -= 1
        if not left[step.group]:
            whole |= built[step.group]
    assert whole == goal


def attempt(
    start: EMUSet, plan: Plan, schemas: dict[ModelStage, StateSchema], capacity: dict[int, int]
) -> TransitionDAG | InfeasibleError:
    """The transition, or why there is none."""
    try:
        return compile(start, plan, schemas, Budget(capacity))
    except InfeasibleError as error:
        return error


@pytest.mark.parametrize("batch", range(PAIRS // BATCH))
def test_every_shard_equals_the_oracle_and_nothing_moves_twice(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        schemas, before, after = random_pair(seed)
        start = expand(before)
        dag = compile(start, after, schemas)
        assert_last_copy_survives(dag)
        world = filled(start, schemas)
        traffic = execute(dag, schemas, world)
        assert_holds(world, dag.goal, schemas)
        assert +traffic.received_bytes == lacking(dag, schemas), f"seed {seed}"
        assert traffic.sent_bytes.total() == traffic.received_bytes.total()


def test_four_in_five_pairs_change_tp_or_pp() -> None:
    changing = sum(changes_degrees(*random_pair(seed)[1:]) for seed in range(PAIRS))
    assert changing >= 0.8 * PAIRS


@pytest.mark.parametrize("seed", range(30))
def test_there_and_back_and_a_chain_of_five_keep_every_bit(seed: int) -> None:
    schemas, first, second = random_pair(1000 + seed)
    rng = random.Random(seed)
    plans = [first, second, first, *(random_plan(rng, schemas, rng.sample(range(10), 8)) for _ in range(3)), first]
    units = expand(first)
    world = filled(units, schemas)
    for target in plans[1:]:
        dag = compile(units, target, schemas)
        execute(dag, schemas, world)
        units = dag.goal
        assert_holds(world, units, schemas)
        assert {a.candidate.model_stage: a.devices for a in target.assignments} == {
            ms: frozenset(device for unit in units.of(ms) for device in unit.devices) for ms in units.model_stages
        }


@pytest.mark.parametrize("seed", range(60))
def test_tight_memory_is_never_passed_and_an_infeasible_target_changes_nothing(seed: int) -> None:
    schemas, before, after = random_pair(2000 + seed)
    start = expand(before)
    free = compile(start, after, schemas)
    peak = peak_bytes(free, schemas)
    now, then = stored_bytes(start, schemas), stored_bytes(free.goal, schemas)
    least = {device: max(now[device], then[device]) for device in peak}
    share = random.Random(seed).choice([0.0, 0.3, 0.6, 0.9])
    capacity = {d: int(least[d] + share * (peak[d] - least[d])) for d in peak}
    world = filled(start, schemas)
    dag = attempt(start, after, schemas, capacity)
    if isinstance(dag, InfeasibleError):
        assert min(dag.short_bytes.values()) > 0
        assert_holds(world, start, schemas)
        return
    assert_last_copy_survives(dag)
    predicted = fit(dag, schemas, capacity)
    traffic = execute(dag, schemas, world, capacity)
    assert_holds(world, dag.goal, schemas)
    for device, most in traffic.peak_bytes.items():
        assert most == predicted.get(device, 0)


@pytest.mark.parametrize("seed", range(20))
def test_flows_add_up_to_the_expanded_moves_of_each_primitive(seed: int) -> None:
    schemas, before, after = random_pair(3000 + seed)
    dag = compile(expand(before), after, schemas)
    for ms, schema in schemas.items():
        found = flows_of(dag, ms, schema)
        for primitive in dag.primitives:
            if primitive.model_stage == ms:
                moves = moves_of(dag, primitive, schema)
                total = sum(flow.elements for flow in found.get(primitive.id, ())) * schema.element_bytes
                assert sum(move.bytes for move in moves) == total
                mine = [m for d in sorted(primitive.devices) for m in moves_of(dag, primitive, schema, device=d)]
                assert Counter(mine) == Counter([*moves, *moves])


@pytest.mark.parametrize("seed", range(60))
def test_with_replicas_no_sender_is_a_funnel(seed: int) -> None:
    schemas, before, after = random_pair(4000 + seed)
    dag = compile(expand(before), after, schemas)
    for ms, schema in schemas.items():
        sent: Counter[int] = Counter()
        for found in flows_of(dag, ms, schema).values():
            for flow in found:
                sent[flow.source] += flow.elements * schema.element_bytes
        if sent and before.of(ms).candidate.dp > 1:
            built = [unit for unit in dag.goal.of(ms) if unit not in dag.start.units]
            least = least_busiest_sender(schema, dag.start.of(ms), built)
            assert max(sent.values()) <= 1.5 * max(sent.total() / len(sent), least)
