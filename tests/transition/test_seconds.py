"""Seconds of a primitive on a machine whose memory was measured: by hand, for tensors that TP cuts evenly."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from nereus.core import DTYPE_BYTES, EMU, Cluster, EMUSet, Layout, Primitive, StateSchema, TransitionDAG, expand
from nereus.transition import Loads, aliased, compile, compose, connect, local_copies
from nereus.transition.routes import alias_source, goal_units
from tests.support.models import ACTOR, even, full_bytes, units
from tests.support.pairs import random_plan, random_schemas
from tests.support.small import CLUSTER

SCHEMA = even(rows=2048)
SIZE = full_bytes(SCHEMA)
PAIR, ALL, COPY, HASH = 4e9, 6e9, 2e9, 1e9


def measured(all_bytes_per_s: float) -> Cluster:
    """One node without latency."""
    moving = {"state.bytes_per_s": PAIR, "state.all_bytes_per_s": all_bytes_per_s, "send.share": 0.1}
    (kind,) = CLUSTER.kinds.values()
    kind = replace(kind, constants={"state.copy_bytes_per_s": COPY, "state.hash_bytes_per_s": HASH})
    devices = tuple(replace(device, node=0) for device in CLUSTER.devices)
    links = {"intra": replace(CLUSTER.links["intra"], latency_s=0.0, constants=moving), "inter": CLUSTER.links["inter"]}
    return Cluster(devices, {kind.name: kind}, links)


def seconds(start: tuple[EMU, ...], goal: tuple[EMU, ...], all_bytes_per_s: float = ALL) -> list[float]:
    """Of the acquiring primitives in order, but for those that have nothing to do."""
    dag: TransitionDAG = connect(EMUSet(start), EMUSet(goal), {ACTOR: SCHEMA})
    loads = Loads(dag, {ACTOR: SCHEMA}, measured(all_bytes_per_s))
    return [found.seconds for found in loads.of.values() if found.seconds]


def test_a_pair_alone_moves_at_its_own_rate_and_several_share_what_their_node_has() -> None:
    one = units(ACTOR, Layout(2), 0, 1)
    assert seconds(units(ACTOR, Layout(1), 0), units(ACTOR, Layout(1), 0, 1)) == [pytest.approx(SIZE / PAIR)]
    both = units(ACTOR, Layout(2), 0, 1, 2, 3)
    assert seconds(one, both) == [pytest.approx(SIZE / ALL)]
    assert seconds(one, both, all_bytes_per_s=2 * PAIR) == [pytest.approx(SIZE / 2 / PAIR)]


def test_what_a_device_keeps_in_another_cut_is_copied() -> None:
    """Each device of TP 2 keeps the half that it had of TP 1 or gets it; counted as if one did both."""
    found = seconds(units(ACTOR, Layout(1), 0), units(ACTOR, Layout(2), 0, 1))
    assert found == [pytest.approx(SIZE / 2 / PAIR + SIZE / 2 / COPY)]


def test_copies_that_are_merged_are_hashed_first() -> None:
    """Nothing moves: each of two whole copies gives one half."""
    found = seconds(units(ACTOR, Layout(1), 0, 1), units(ACTOR, Layout(2), 0, 1))
    assert found == [pytest.approx(SIZE / 2 / COPY + SIZE / HASH)]


def copied_bytes(dag: TransitionDAG, group: tuple[Primitive, ...], schema: StateSchema) -> int:
    """The most that a device copies from its old position, and allocates as padding, tensor by tensor."""
    sums = Counter[int]()
    for goal in goal_units(dag, group):
        for device in goal.devices:
            old, shared = alias_source(group, device), frozenset[str]()
            if old is not None:
                shared = aliased(schema, old, goal, device)
                sums[device] += sum(move.bytes for move in local_copies(schema, old, goal, device))
            _, tp_rank = goal.position(device)
            for tensor, start, stop in schema.held(goal, device):
                if tensor.name not in shared:
                    owned = (
                        tensor.elements * (stop - start) // (tensor.shape[tensor.cut.dim or 0] if tensor.shape else 1)
                    )
                    padding = prod(tensor.local_shape(goal.layout.tp, tp_rank)) - owned
                    sums[device] += padding * sum(DTYPE_BYTES[dtype] for dtype in schema.dtypes.values())
    return max(sums.values(), default=0)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_copied_is_the_sum_of_the_copies_of_the_busiest_device(seed: int) -> None:
    """Of direct and of composed transitions: the first primitive of a group takes a second a byte longer."""
    rng = random.Random(seed)
    schemas = random_schemas(rng)
    before, after = (rng.sample(range(16), rng.randint(2, 16)) for _ in range(2))
    start = random_plan(rng, schemas, before)
    goal = random_plan(rng, schemas, after, start)
    kinds = {name: replace(kind, constants={"state.copy_bytes_per_s": 1.0}) for name, kind in CLUSTER.kinds.items()}
    slow = replace(CLUSTER, kinds=kinds)
    for dag in (compile(expand(start), goal, schemas), *compose(expand(start), goal, schemas)):
        free, copying = (Loads(dag, schemas, cluster).of for cluster in (CLUSTER, slow))
        for group in dag.groups.values():
            first, schema = group[0].id, schemas[group[0].model_stage]
            taken_s = copying[first].seconds - free[first].seconds
            assert taken_s == pytest.approx(copied_bytes(dag, group, schema), abs=1e-3)
