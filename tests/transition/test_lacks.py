"""What a position lacks, index by index, against the intervals that each position holds."""

from __future__ import annotations

import random
from itertools import product

import pytest

from nereus.core import EMU, Layout, StateSchema
from nereus.transition.lacks import Lacks, lacks_of
from tests.support.models import ACTOR, decoder
from tests.support.pairs import random_assignment

Indices = dict[str, set[int]]
"""Tensor → indices of its cut dim."""


def random_layouts(rng: random.Random, schema: StateSchema) -> tuple[Layout, ...]:
    found = [random_assignment(rng, ACTOR, schema.layers, range(8)).candidate.layout for _ in range(rng.randint(1, 2))]
    return tuple(dict.fromkeys(found))


def held(schema: StateSchema, layouts: tuple[Layout, ...]) -> list[Indices]:
    """What each position holds, positions of all layouts one after another."""
    units = [EMU(ACTOR, layout, tuple(range(layout.size))) for layout in layouts]
    return [
        {tensor.name: set(range(start, stop)) for tensor, start, stop in schema.held(unit, device)}
        for unit in units
        for device in unit.devices
    ]


def indices(known: Lacks, part: tuple[int, int, int]) -> Indices:
    family, start, stop = part
    return {
        tensor.name: set(range(start * members.step, stop * members.step))
        for members in known.families[family]
        for tensor in members.tensors
    }


@pytest.mark.parametrize("seed", range(12))
def test_what_is_lacked_is_what_is_needed_and_not_held_and_its_owners_are_all_that_hold_it(seed: int) -> None:
    rng = random.Random(seed)
    schema = decoder(layers=rng.choice([3, 4]), vocab=rng.choice([16, 17]), tied=rng.random() < 0.5)
    sources, targets = random_layouts(rng, schema), random_layouts(rng, schema)
    known = lacks_of(schema).of(sources, targets)
    owned, needed = held(schema, sources), held(schema, targets)
    assert list(known.source_base) == list(sources)
    assert known.target_base[targets[-1]] == len(needed) - targets[-1].size
    for target, source in product(range(len(needed)), (-1, *range(len(owned)))):
        lacks, copied = known.of(target, source)
        left = {name: set(found) for name, found in needed[target].items()}
        own = owned[source] if source >= 0 else {}
        for part in copied:
            for name, found in indices(known, part).items():
                assert found <= left[name] & own[name]
                left[name] -= found
        for lack in lacks:
            elements = 0
            for part in lack.parts:
                for name, found in indices(known, part).items():
                    assert found <= left[name] - own.get(name, set())
                    left[name] -= found
                    assert [at for at, each in enumerate(owned) if found <= each.get(name, set())] == list(
                        lack.positions
                    )
                    (tensor,) = (tensor for tensor in schema.tensors if tensor.name == name)
                    elements += len(found) * (tensor.elements // tensor.shape[tensor.cut.dim or 0])
            assert lack.elements == elements
        assert not any(left.values())
