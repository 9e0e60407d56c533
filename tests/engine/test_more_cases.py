"""Cases of resharding beside those written down: what a strict reader of the list would try next.

Each goes through the whole engine in one process, there, back and through a random chain, or through the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nereus.core import Cut, EMUSet, InfeasibleError, Kind, Layout, StateSchema, TensorSpec, TransitionError, Where
from nereus.engine.groups import Group
from nereus.engine.library import (
    Region,
    Shard,
    describe,
    optimizer_shards,
    restore_optimizer,
    stream_name,
    stream_seed,
    stream_shard,
    target_shards,
)
from nereus.engine.transports.memory import World, execute
from nereus.transition.compile import connect
from tests.oracles.cut import cut
from tests.support.library import bare, empty, move, numbered, ran, rows
from tests.support.models import ACTOR, CRITIC, FROZEN, REWARD, TRAINED, decoder, units
from tests.support.worlds import assert_holds
from tests.transition.test_cases import Walk

ADAM = {Kind.PARAM: "bf16", Kind.MASTER: "fp32", Kind.EXP_AVG: "fp32", Kind.EXP_AVG_SQ: "fp32"}


def biased(layers: int, heads: int, kv_heads: int) -> StateSchema:
    """Attention with biases on q, k and v: 1-D tensors that are cut with their heads."""
    tensors = []
    for layer in range(layers):
        q, kv = Cut(0, heads), Cut(0, kv_heads, replicated=True)
        for name, rows_, how in (("q", 2 * heads, q), ("k", 2 * kv_heads, kv), ("v", 2 * kv_heads, kv)):
            tensors.append(TensorSpec(f"{layer}.{name}", (rows_, 6), Where.LAYER, layer, how))
            tensors.append(TensorSpec(f"{layer}.{name}_bias", (rows_,), Where.LAYER, layer, how))
    return StateSchema(layers, tuple(tensors), ADAM)


@pytest.mark.parametrize("vocab", [17, 31, 1])
def test_a_padded_tied_vocabulary_with_uneven_stages(vocab: int) -> None:
    schema = decoder(layers=5, vocab=vocab, tied=True, dtypes=ADAM)
    walk = Walk(schema)
    walk.around(
        Layout(4, 2, (4, 1)), Layout(2, 3, (1, 3, 1)), Layout(8), Layout(1, 5), Layout(2, 2, (2, 3)), seed=vocab
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (8, 2), (12, 3)])
def test_biases_of_heads_that_are_kept_in_copies(heads: int, kv_heads: int) -> None:
    walk = Walk(biased(3, heads, kv_heads))
    degrees = [tp for tp in (2, 3, 4, 6, 8) if heads % tp == 0 and (tp % kv_heads == 0 or kv_heads % tp == 0)]
    walk.around(*(Layout(tp, pp) for tp in degrees for pp in (1, 3)), seed=heads)


def test_one_layer_and_more_stages_than_some_have_layers() -> None:
    """An explicit stage without layers holds what belongs to its end of the model alone."""
    walk = Walk(decoder(layers=1, dtypes=ADAM))
    walk.around(Layout(2), Layout(1, 2, (0, 1)), Layout(2, 2, (1, 0)), Layout(1, 3, (0, 1, 0)))


def test_tensors_without_dims_are_whole_everywhere() -> None:
    tensors = tuple(TensorSpec(f"{layer}.seen", (), Where.LAYER, layer) for layer in range(2))
    schemas = {ACTOR: StateSchema(2, tensors, {Kind.PARAM: "int64"})}
    world, at = World(), EMUSet(units(ACTOR, Layout(), 0))
    values = {("0.seen", Kind.PARAM): np.array(1 << 40), ("1.seen", Kind.PARAM): np.array(-7)}
    world.positions[0, at.units[0]] = dict(values)
    for goal in (
        units(ACTOR, Layout(2), 1, 2),
        units(ACTOR, Layout(1, 2), 2, 3),
        units(ACTOR, Layout(2, 2), *range(8)),
    ):
        execute(connect(at, EMUSet(goal), schemas), schemas, world)
        at = EMUSet(goal)
        for (device, unit), held in world.positions.items():
            layer, _ = unit.position(device)
            wanted = [layer] if unit.layout.pp == 2 else [0, 1]
            assert held == {(f"{index}.seen", Kind.PARAM): values[f"{index}.seen", Kind.PARAM] for index in wanted}
            assert {array.shape for array in held.values()} == {()}


@pytest.mark.parametrize("absent", ["start", "goal"])
def test_a_model_stage_that_is_on_one_side_only(absent: str) -> None:
    """What goes is destroyed to the last copy only if the goal says so; what comes from nothing is refused."""
    both = EMUSet((*units(ACTOR, Layout(2), 0, 1), *units(REWARD, Layout(), 2)))
    one = EMUSet(units(ACTOR, Layout(), 0, 1))
    schemas = {ACTOR: decoder(dtypes=TRAINED), REWARD: decoder(dtypes=FROZEN)}
    start, goal = (one, both) if absent == "start" else (both, one)
    kind, said = (InfeasibleError, "no unit exists") if absent == "start" else (TransitionError, "the goal has no unit")
    with pytest.raises(kind, match=f"reward/inference: {said}"):
        connect(start, goal, schemas)


def test_three_layouts_of_one_model_at_once_become_one() -> None:
    """What a transition that stopped may leave, and two other models beside it on the same devices."""
    schemas = {
        ACTOR: decoder(dtypes=TRAINED),
        CRITIC: decoder(scalar=True, dtypes=TRAINED),
        REWARD: decoder(dtypes=FROZEN),
    }
    left = (*units(ACTOR, Layout(2), 0, 1), *units(ACTOR, Layout(1, 2), 2, 3), *units(ACTOR, Layout(), 4))
    beside = (*units(CRITIC, Layout(1, 4), 0, 1, 2, 3), *units(REWARD, Layout(4), 4, 5, 6, 7))
    goal = (*units(ACTOR, Layout(4, 2), *range(8)), *units(CRITIC, Layout(2), 6, 7), *units(REWARD, Layout(), 0, 1))
    start, end = EMUSet((*left, *beside)), EMUSet(goal)
    world = World()
    for unit in start:
        for device in unit.devices:
            world.positions[device, unit] = cut(schemas[unit.model_stage], unit, device)
    execute(connect(start, end, schemas), schemas, world)
    assert_holds(world, end, schemas)
    assert set(world.units) == set(end)


def experts(ep: int, rank: int, full: Mapping[str, torch.Tensor], fill: bool) -> dict[str, Shard]:
    """Whole experts on their EP rank, the router and its counters on every one."""
    found = {}
    for name, tensor in full.items():
        number = name.partition("experts.")[2].partition(".")[0]
        if number and int(number) * ep // 6 != rank:
            continue
        found[name] = Shard(tensor.clone() if fill else torch.full_like(tensor, 1))
    return found


def test_experts_move_over_expert_parallel_ranks_and_are_cut_by_tensor_parallelism() -> None:
    full: dict[str, torch.Tensor] = {f"experts.{n}.w": numbered(4, 3) + 100 * n for n in range(6)}
    full |= {"router.w": numbered(6, 3), "router.load": torch.arange(6, dtype=torch.int32)}

    def act(group: Group) -> dict[str, torch.Tensor]:
        old = experts(2, group.rank, full, True) if group.rank < 2 else {}
        apart = experts(3, group.rank, full, False) if group.rank < 3 else {}
        move(group, old, apart)
        cut_ = {name: empty(rows(full[name], 4, group.rank)) for name in full if name.startswith("experts")}
        move(group, {name: shard for name, shard in apart.items() if name in cut_}, cut_)
        return {**{f"ep {name}": shard.tensor for name, shard in apart.items()}, **bare(cut_)}

    for rank, held in enumerate(ran(4, act)):
        for name, tensor in held.items():
            wanted = full[name[3:]] if name.startswith("ep ") else full[name].chunk(4)[rank]
            assert torch.equal(tensor, wanted), f"rank {rank}: {name}"


def test_quantised_weights_move_with_the_scales_of_their_blocks() -> None:
    weight = (numbered(8, 16) % 15 - 7).to(torch.float8_e4m3fn)
    scales, amax = numbered(4, 4) + 0.5, torch.tensor(3.25)

    def act(group: Group) -> dict[str, torch.Tensor]:
        def held(tp: int, fill: bool) -> dict[str, Shard]:
            if group.rank >= tp:
                return {}
            found = {
                "w": rows(weight, tp, group.rank),
                "w_scale": rows(scales, tp, group.rank),
                "amax": Shard(amax.clone()),
            }
            return found if fill else {name: empty(shard) for name, shard in found.items()}

        now, then = held(2, True), held(4, False)
        move(group, now, then)
        back = held(1, False)
        move(group, then, back)
        return bare(back)

    found = ran(4, act)[0]
    assert torch.equal(found["w"].view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(found["w_scale"], scales)
    assert torch.equal(found["amax"], amax)


def place(tp: int, rank: int) -> Any:
    def at(name: str, parameter: torch.Tensor) -> tuple[tuple[int, ...], Region]:
        shape = (parameter.shape[0] * tp, *parameter.shape[1:])
        return shape, Region.chunk(shape, 0, tp, rank)

    return at


def test_a_frozen_base_with_trained_adapters_and_groups_that_change_order() -> None:
    """State for the adapters alone; one group's own step counters; the new ranks list their parameters otherwise."""

    def act(group: Group) -> tuple[list[Any], set[str]]:
        base, lora = nn.Parameter(torch.ones(4, 2), requires_grad=False), nn.Parameter(torch.ones(2, 2))
        bias = nn.Parameter(torch.ones(4))
        old: dict[str, Shard] = {}
        if group.rank == 0:
            adam = torch.optim.Adam([{"params": [lora], "lr": 0.1}, {"params": [bias], "lr": 0.2}, {"params": [base]}])
            for steps in range(3):
                (lora.sum() + (bias.sum() if steps else 0.0)).backward()
                adam.step()
                adam.zero_grad()
            old = optimizer_shards({"base": base, "lora": lora, "bias": bias}, adam, place(1, 0))
        tensors, _ = describe(old, group)
        named = {
            name: nn.Parameter(torch.zeros(rows_, *rest))
            for name, rows_, *rest in (("bias", 2), ("lora", 1, 2), ("base", 2, 2))
        }
        new = target_shards(named, tensors, place(2, group.rank))
        move(group, old, new)
        optimizer = restore_optimizer(torch.optim.Adam, named, tensors, bare(new))
        names = {id(parameter): name for name, parameter in named.items()}
        rates = [
            (each["lr"], [names[id(parameter)] for parameter in each["params"]]) for each in optimizer.param_groups
        ]
        steps_ = {
            name: float(optimizer.state[parameter]["step"])
            for name, parameter in named.items()
            if optimizer.state.get(parameter)
        }
        return [rates, steps_, named["base"].requires_grad], set(tensors)

    for (rates, steps, trains), names in ran(2, act):
        assert rates == [(0.1, ["lora"]), (0.2, ["bias"]), (1e-3, ["base"])]
        assert steps == {"lora": 3.0, "bias": 2.0}
        assert not trains
        assert not any(name.startswith("base@") for name in names)


def test_a_rank_that_joins_with_a_seeded_generator_of_its_own_does_not_keep_it() -> None:
    """Streams of ranks that were there go on; a new one starts from (seed, name), not from what its process had."""

    def act(group: Group) -> list[int]:
        generator = torch.Generator().manual_seed(1234 + group.rank)
        torch.rand(3, generator=generator)
        old = {stream_name("dp", group.rank): stream_shard(generator)} if group.rank < 2 else {}
        name = stream_name("dp", group.rank)
        new = {name: Shard(torch.empty_like(generator.get_state()), fresh=True)}
        _, report = move(group, old, new)
        if name in report.fresh:
            generator.manual_seed(stream_seed(7, name, 40))
        else:
            generator.set_state(new[name].tensor)
        drawn: list[int] = torch.randint(1 << 30, (2,), generator=generator).tolist()
        return drawn

    first, again = (ran(4, act) for _ in range(2))
    assert first == again
    assert len({tuple(drawn) for drawn in first}) == 4
    for rank in range(2):
        alone = torch.Generator().manual_seed(1234 + rank)
        torch.rand(3, generator=alone)
        assert first[rank] == torch.randint(1 << 30, (2,), generator=alone).tolist()


def test_norms_in_copies_beside_cut_tensors_and_an_uneven_last_part() -> None:
    """Sequence parallelism keeps norms whole on each tp rank; 7 rows on 4 ranks leave 1 for the last."""
    weight, norm = numbered(7, 3), numbered(3)

    def act(group: Group) -> dict[str, torch.Tensor]:
        def held(tp: int, fill: bool) -> dict[str, Shard]:
            if group.rank >= tp:
                return {}
            found = {"w": rows(weight, tp, group.rank), "norm": Shard(norm.clone())}
            return found if fill else {name: empty(shard) for name, shard in found.items()}

        first, second, third = held(4, True), held(3, False), held(2, False)
        move(group, first, second)
        move(group, second, third)
        return bare(third)

    found = ran(4, act)[:2]
    assert torch.equal(torch.cat([held["w"] for held in found]), weight)
    assert all(torch.equal(held["norm"], norm) for held in found)
