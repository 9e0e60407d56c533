"""Weight synchronisation's routes: each element once to whom lacks it, and none twice out of a source."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest

from nereus.core import EMU, Kind, Layout, Move, StateSchema, TensorSpec
from nereus.transition import expand_flows, routes
from nereus.transition.flows import Job
from nereus.transition.relays import relayed
from tests.oracles.cut import cut, lacks_bytes
from tests.support.models import ACTOR, FROZEN, ROLLOUT, decoder, full_bytes, units
from tests.support.pairs import random_assignment


def sides(seed: int) -> tuple[StateSchema, tuple[EMU, ...], tuple[EMU, ...]]:
    """A trained model and one that generates, on pools that overlap or do not."""
    rng = random.Random(seed)
    schema = decoder(layers=rng.choice([3, 4, 5]), vocab=rng.choice([16, 17]), tied=rng.random() < 0.5, dtypes=FROZEN)
    pools = (range(4), range(rng.choice([0, 2, 4]), 14))
    trained, generating = (random_assignment(rng, ACTOR, schema.layers, pool) for pool in pools)
    return (
        schema,
        tuple(EMU(ACTOR, trained.candidate.layout, devices) for devices in trained.units),
        tuple(EMU(ROLLOUT, generating.candidate.layout, devices) for devices in generating.units),
    )


def total(moves: Iterable[Move], by: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for move in moves:
        for device in (move.source,) if by == "source" else move.targets:
            found[device] += move.bytes
    return found


def rows_of(schema: StateSchema, unit: EMU, device: int) -> set[tuple[str, int]]:
    """(tensor, index of its cut dim) of all that a device holds, by the oracle's cut of numbered rows."""
    dims = {tensor.name: tensor.cut.dim or 0 for tensor in schema.tensors}

    def numbers(_: StateSchema, tensor: TensorSpec, __: Kind) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = np.indices(tensor.shape)[dims[tensor.name]] + 1
        return found

    return {
        (name, int(row) - 1)
        for (name, _), held in cut(schema, unit, device, numbers).items()
        for row in np.unique(held)
        if row  # not padding
    }


NODES: dict[str, dict[int, int] | None] = {
    "one node": None,
    "nodes of 4": {device: device // 4 for device in range(14)},
    "nodes of 3, some unknown": {device: device // 3 for device in range(11)},
}


def phases(
    schema: StateSchema, sources: tuple[EMU, ...], targets: tuple[EMU, ...], node_of: dict[int, int] | None = None
) -> list[tuple[Move, ...]]:
    found = relayed(schema, Job(sources, targets), node_of)
    return [tuple(expand_flows(flows, schema, (Kind.PARAM,))) for flows in found]


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("seed", range(40))
def test_every_receiver_gets_what_it_lacks_once_from_whom_has_it_by_then(seed: int, nodes: str) -> None:
    schema, sources, targets = sides(seed)
    found = phases(schema, sources, targets, NODES[nodes])
    wanted = Counter({d: lacks_bytes(schema, sources, unit, d) for unit in targets for d in unit.devices})
    assert total(chain(*found), "target") == +wanted
    held = {device: rows_of(schema, unit, device) for unit in sources for device in unit.devices}
    arrived: dict[int, set[tuple[str, int]]] = {device: set() for unit in targets for device in unit.devices}
    for moves in found:
        before = held if moves is found[0] else {device: set(rows) for device, rows in arrived.items()}
        for move in moves:
            rows = {(move.tensor, row) for row in range(move.box.start, move.box.stop)}
            assert rows <= before[move.source], f"{move.source} does not hold it yet"
            for target in move.targets:
                assert not rows & arrived[target], "written twice"
                arrived[target] |= rows
    for unit in targets:
        for device in unit.devices:
            assert rows_of(schema, unit, device) <= arrived[device] | held.get(device, set())


@pytest.mark.parametrize("nodes", ["nodes of 4", "nodes of 3, some unknown"])
@pytest.mark.parametrize("seed", range(40))
def test_nothing_enters_a_node_twice_nor_where_it_is_already(seed: int, nodes: str) -> None:
    schema, sources, targets = sides(seed)
    known = NODES[nodes] or {}
    node_of = {device: known.get(device, -device) for device in range(14)}
    there = {(node_of[d], row) for unit in sources for d in unit.devices for row in rows_of(schema, unit, d)}
    entered: Counter[tuple[int, tuple[str, int]]] = Counter()
    for move in chain(*phases(schema, sources, targets, known)):
        rows = {(move.tensor, row) for row in range(move.box.start, move.box.stop)}
        for target in move.targets:
            if node_of[target] != node_of[move.source]:
                entered.update((node_of[target], row) for row in rows)
    assert max(entered.values(), default=1) == 1
    assert not entered.keys() & there


def test_one_sender_sends_each_element_out_of_its_node_once() -> None:
    """And every other node gets it once, whatever its size."""
    schema = decoder(dtypes=FROZEN)
    sources, targets = units(ACTOR, Layout(), 0), units(ROLLOUT, Layout(), *range(4, 16))
    sent, across, inside = phases(schema, sources, targets, {device: device // 4 for device in range(16)})
    assert total(sent, "source") == {0: full_bytes(schema)}
    assert sum(total(across, "source").values()) == 2 * full_bytes(schema)
    assert sum(total(inside, "source").values()) == 9 * full_bytes(schema)
    outward = total((*sent, *across), "target")
    assert max(outward.values()) <= 1.25 * min(outward.values())


@pytest.mark.parametrize("receivers", [2, 3, 8])
def test_one_sender_sends_every_element_once_to_many(receivers: int) -> None:
    """OpenRLHF#533: one sender to all engines took more than 40 % of a step."""
    schema = decoder(dtypes=FROZEN)
    sources, targets = units(ACTOR, Layout(), 0), units(ROLLOUT, Layout(), *range(1, receivers + 1))
    first, across, then = phases(schema, sources, targets)
    assert not across
    assert total(first, "source") == {0: full_bytes(schema)}
    assert total(routes(schema, sources, targets), "source") == {0: receivers * full_bytes(schema)}
    loads = total(then, "source")
    assert set(loads) == set(range(1, receivers + 1))
    assert max(loads.values()) <= 1.25 * min(loads.values())


def test_sources_that_are_enough_send_straight() -> None:
    schema = decoder(dtypes=FROZEN)
    sources, targets = units(ACTOR, Layout(), *range(4)), units(ROLLOUT, Layout(2), *range(4, 8))
    first, *then = relayed(schema, Job(sources, targets))
    assert not any(then)
    assert {flow.source for flow in first} == {0, 1, 2, 3}


def test_parts_do_not_depend_on_the_rank_that_asks() -> None:
    schema, sources, targets = sides(3)
    assert relayed(schema, Job(sources, targets)) == relayed(schema, Job(sources[::-1], targets[::-1]))
