"""The engine as a library, on threads: any boxes, any dtype, any strides."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
import torch

from nereus.core import NereusError
from nereus.engine.groups import Group
from nereus.engine.library import (
    BoxPlan,
    LogicalTensor,
    Options,
    Placement,
    Region,
    Report,
    Shard,
    allocate,
    describe,
    plan_routes,
    reshard,
)
from tests.support.library import VERIFIED, failures
from tests.support.shards import DTYPES, Tensors, bits, cut, halves
from tests.support.threads import each_rank


def moved(
    plan: BoxPlan, size: int, options: Options = VERIFIED, source: Callable[[int], Tensors] | None = None
) -> list[tuple[Tensors, Report]]:
    """Run a plan on threads; sources must come out as they went in."""

    def act(group: Group) -> tuple[Tensors, Report]:
        mine = cut(plan.tensors, plan.source, group.rank) if source is None else source(group.rank)
        before = {name: bits(tensor) for name, tensor in mine.items()}
        target = allocate(plan.tensors, plan.target, group.rank)
        report = reshard(plan, mine, target, group, options)
        assert {name: bits(tensor) for name, tensor in mine.items()} == before
        return target, report

    found: list[tuple[Tensors, Report]] = []
    for result in each_rank(size, act):
        if isinstance(result, NereusError):
            raise result
        found.append(result)
    return found


def assert_exact(plan: BoxPlan, found: list[tuple[Tensors, Report]]) -> None:
    for rank, (target, report) in enumerate(found):
        wanted = cut(plan.tensors, plan.target, rank)
        assert target.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert target[name].dtype == tensor.dtype
            assert target[name].shape == tensor.shape
            assert bits(target[name]) == bits(tensor), f"rank {rank}: {name}"
        assert report.received_bytes == plan.received_bytes[rank]
        assert report.sent_bytes == plan.sent_bytes[rank]


def random_boxes(rng: random.Random, shape: tuple[int, ...], ranks: int) -> dict[int, Region]:
    """One or two copies of a tensor, each cut along random dims; some parts are empty."""
    order = rng.sample(range(ranks), ranks)
    boxes: dict[int, Region] = {}
    for _ in range(rng.randint(1, 2)):
        tiles = [Region.whole(shape)]
        while shape and len(tiles) < ranks - len(boxes) and rng.random() < 0.7:
            region = tiles.pop(rng.randrange(len(tiles)))
            dim = rng.randrange(len(shape))
            at = rng.randint(region.start[dim], region.stop[dim])
            low, high = list(region.stop), list(region.start)
            low[dim] = high[dim] = at
            tiles += [Region(region.start, tuple(low)), Region(tuple(high), region.stop)]
        free = [rank for rank in order if rank not in boxes]
        if len(free) < len(tiles):
            break
        boxes.update(zip(free, tiles, strict=False))
    return boxes


@pytest.mark.parametrize("seed", range(12))
def test_random_boxes_arrive_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(2, 5)
    tensors: dict[str, LogicalTensor] = {}
    boxes: list[dict[str, Mapping[int, Region]]] = [{}, {}]
    for index in range(8):
        shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 3)))
        name = f"t{index}"
        tensors[name] = LogicalTensor(name, shape, rng.choice(DTYPES))
        for placed in boxes:
            placed[name] = random_boxes(rng, shape, ranks)
    there = plan_routes(tensors.values(), Placement(boxes[0]), Placement(boxes[1]))
    options = Options(bucket_bytes=rng.choice([1, 1 << 14, 1 << 26]), read_memory=rng.random() < 0.5, verify=True)
    assert_exact(there, moved(there, ranks, options))
    back = plan_routes(tensors.values(), Placement(boxes[1]), Placement(boxes[0]))
    assert_exact(back, moved(back, ranks, options))


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 16, 1 << 26])
def test_large_tensors_are_cut_into_messages_and_staging_is_bounded(bucket_bytes: int) -> None:
    tensors = {
        "columns": LogicalTensor("columns", (300, 500), "float32"),
        "rows": LogicalTensor("rows", (500, 300), "bfloat16"),
        "vector": LogicalTensor("vector", (70_001,), "int16"),
    }
    source = Placement({name: halves(0, tensor.shape, 2) for name, tensor in tensors.items()})
    target = Placement(
        {
            "columns": halves(1, (300, 500), 3),
            "rows": halves(0, (500, 300), 3),
            "vector": halves(0, (70_001,), 3),
        }
    )
    plan = plan_routes(tensors.values(), source, target)
    found = moved(plan, 3, Options(bucket_bytes=bucket_bytes, verify=True))
    assert_exact(plan, found)
    for _, report in found:
        assert report.staging_bytes <= 2 * max(bucket_bytes, 4 * 2 * (1 << 12)) + 2 * 4 * 2 * 64


def test_what_is_contiguous_on_both_sides_needs_no_staging() -> None:
    tensor = LogicalTensor("w", (1 << 12, 64), "float32")
    plan = plan_routes(
        [tensor], Placement({"w": {0: Region.whole(tensor.shape)}}), Placement({"w": halves(0, tensor.shape, 2)})
    )
    found = moved(plan, 2, Options(bucket_bytes=1 << 16))
    assert_exact(plan, found)
    assert [report.staging_bytes for _, report in found] == [0, 0]


def test_a_tensor_that_stays_is_kept_as_it_is() -> None:
    tensor = LogicalTensor("w", (4,), "float32")
    here = Placement({"w": {0: Region.whole((4,)), 1: Region.whole((4,))}})
    plan = plan_routes([tensor], here, here)

    def act(group: Group) -> bool:
        mine = {"w": torch.ones(4)}
        target = allocate(plan.tensors, plan.target, group.rank, keep=mine)
        reshard(plan, mine, target, group, VERIFIED)
        return target["w"] is mine["w"]

    assert each_rank(2, act) == [True, True]


def test_a_target_may_be_a_view_of_the_part_of_its_source_that_stays() -> None:
    tensor = LogicalTensor("w", (8, 2), "float32")
    source, target = (
        Placement({"w": halves(0, (8, 2), 2)}),
        Placement(
            {
                "w": {r: Region((4 * r, 0), (4 * r + 2, 2)) for r in range(2)}
                | {2: Region((2, 0), (4, 2)), 3: Region((6, 0), (8, 2))}
            }
        ),
    )
    plan = plan_routes([tensor], source, target)

    def act(group: Group) -> list[int]:
        mine = cut(plan.tensors, plan.source, group.rank)
        keep = {"w": mine["w"][:2]} if mine else {}
        new = allocate(plan.tensors, plan.target, group.rank, keep=keep)
        reshard(plan, mine, new, group, VERIFIED)
        return bits(new["w"])

    assert each_rank(4, act) == [bits(cut(plan.tensors, plan.target, rank)["w"]) for rank in range(4)]

    def elsewhere(group: Group) -> None:
        mine = cut(plan.tensors, plan.source, group.rank)
        new = {"w": mine["w"][2:]} if mine else allocate(plan.tensors, plan.target, group.rank)
        reshard(plan, mine, new, group, VERIFIED)

    assert all("target w lies in memory of source w" in error for error in failures(4, elsewhere))


def test_descriptions_of_all_ranks_are_put_together() -> None:
    def act(group: Group) -> tuple[dict[str, LogicalTensor], Placement]:
        held = {"step": Shard(torch.zeros(()))}
        if group.rank:
            region = Region.chunk((6, 2), 0, 2, group.rank - 1)
            held["w"] = Shard(torch.zeros(3, 2), (6, 2), region, {"partition_dim": 0})
        return describe(held, group, replica=0)

    for told in each_rank(3, act):
        assert not isinstance(told, NereusError)
        tensors, placement = told
        assert tensors["w"] == LogicalTensor("w", (6, 2), "float32", {"partition_dim": 0})
        assert placement.boxes["w"] == {1: Region((0, 0), (3, 2)), 2: Region((3, 0), (6, 2))}
        assert placement.boxes["step"] == {rank: Region((), ()) for rank in range(3)}
        assert placement.replicas == {0: 0, 1: 0, 2: 0}
