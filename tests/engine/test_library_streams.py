"""Random streams of single ranks; cases that went wrong in public systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from nereus.engine.groups import Group
from nereus.engine.library import (
    Shard,
    stream_name,
    stream_seed,
    stream_shard,
)
from tests.support.library import empty, move, ran

Generators = Mapping[str, torch.Generator]


def streams(generators: Generators) -> dict[str, Shard]:
    return {name: stream_shard(generator) for name, generator in generators.items()}


def follow(group: Group, old: Generators, names: Sequence[str], seed: int, position: int) -> dict[str, torch.Generator]:
    """This rank's streams after a transition: those that existed go on, others start from (seed, name, position)."""
    states = {name: empty(stream_shard(torch.Generator())) for name in names}
    _, report = move(group, streams(old), states)
    found = {}
    for name, shard in states.items():
        found[name] = torch.Generator()
        if name in report.fresh:
            found[name].manual_seed(stream_seed(seed, name, position))
        else:
            found[name].set_state(shard.tensor)
    return found


def draws(generator: torch.Generator, count: int) -> list[float]:
    return [float(value) for value in torch.rand(count, generator=generator)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_l01_every_position_goes_on_with_its_own_stream_wherever_it_moves(order: tuple[int, ...]) -> None:
    def act(group: Group) -> tuple[list[float], list[float]]:
        position, later = group.rank, order.index(group.rank)
        mine = {stream_name("position", position): torch.Generator().manual_seed(100 + position)}
        draws(mine[stream_name("position", position)], 3)
        (after,) = follow(group, mine, [stream_name("position", later)], 0, 0).values()
        unbroken = torch.Generator().manual_seed(100 + later)
        draws(unbroken, 3)
        return draws(after, 5), draws(unbroken, 5)

    assert all(got == wanted for got, wanted in ran(4, act))


def test_l02_new_replicas_get_streams_of_their_own_the_same_on_every_run() -> None:
    def act(group: Group) -> list[float]:
        name = stream_name("dp", group.rank)
        mine = {name: torch.Generator().manual_seed(stream_seed(7, name))} if group.rank < 2 else {}
        for generator in mine.values():
            draws(generator, 3)
        return draws(follow(group, mine, [name], seed=7, position=40)[name], 4)

    found, again = ran(4, act), ran(4, act)
    assert found == again
    assert len({tuple(each) for each in found}) == 4
    for rank, each in enumerate(found[:2]):
        unbroken = torch.Generator().manual_seed(stream_seed(7, stream_name("dp", rank)))
        assert draws(unbroken, 7)[3:] == each
    assert stream_seed(7, "a", 40) != stream_seed(7, "a", 41) != stream_seed(8, "a", 41)


def test_l03_masks_are_equal_in_the_replicated_region_and_differ_in_the_cut_one() -> None:
    def names(tp: int, rank: int) -> list[str]:
        return [stream_name("data", "dp", 0), stream_name("model", "dp", 0, "tp", rank, "of", tp)]

    def act(group: Group) -> list[list[float]]:
        old = {}
        if group.rank < 2:
            old = {name: torch.Generator().manual_seed(stream_seed(3, name)) for name in names(2, group.rank)}
            for generator in old.values():
                draws(generator, 6)
        after = follow(group, old, names(4, group.rank), seed=3, position=1)
        return [draws(generator, 8) for generator in after.values()]

    found = ran(4, act)
    assert len({tuple(replicated) for replicated, _ in found}) == 1
    assert len({tuple(cut) for _, cut in found}) == 4
    unbroken = torch.Generator().manual_seed(stream_seed(3, stream_name("data", "dp", 0)))
    assert draws(unbroken, 14)[6:] == found[0][0]
