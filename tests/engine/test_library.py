"""The engine as a library, on threads: any boxes, any dtype, any strides; what fails on one rank fails on all."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from nereus.core import NereusError, TransitionError
from nereus.engine import exchange
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
from nereus.engine.packing import pack
from tests.support.threads import each_rank

Tensors = dict[str, torch.Tensor]
DTYPES = [
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "int64", "bool",
    "uint16", "complex64", "complex128",
]  # fmt: skip
QUICK = Options(timeout_s=20, verify=True)


def whole(tensor: LogicalTensor) -> torch.Tensor:
    """Random bits, equal for equal names; of bool only those that torch makes."""
    generator = torch.Generator().manual_seed(sum(map(ord, tensor.name)))
    size = prod(tensor.shape) * tensor.item_bytes
    raw = torch.randint(0, 2 if tensor.dtype == "bool" else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(getattr(torch, tensor.dtype)).view(tensor.shape)


def cut(tensors: Mapping[str, LogicalTensor], placement: Placement, rank: int) -> Tensors:
    found = {}
    for name, box in placement.of(rank).items():
        found[name] = whole(tensors[name])[tuple(map(slice, box.start, box.stop))].clone()
    return found


def bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def moved(
    plan: BoxPlan, size: int, options: Options = QUICK, source: Callable[[int], Tensors] | None = None
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


def halves(dim: int, shape: tuple[int, ...], ranks: int) -> dict[int, Region]:
    return {rank: Region.chunk(shape, dim, ranks, rank) for rank in range(ranks)}


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
        reshard(plan, mine, target, group, QUICK)
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
        reshard(plan, mine, new, group, QUICK)
        return bits(new["w"])

    assert each_rank(4, act) == [bits(cut(plan.tensors, plan.target, rank)["w"]) for rank in range(4)]

    def elsewhere(group: Group) -> None:
        mine = cut(plan.tensors, plan.source, group.rank)
        new = {"w": mine["w"][2:]} if mine else allocate(plan.tensors, plan.target, group.rank)
        reshard(plan, mine, new, group, QUICK)

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


def failures(size: int, act: Callable[[Group], Any]) -> list[str]:
    """What every rank says; all must fail."""
    found = each_rank(size, act)
    assert all(isinstance(error, TransitionError) for error in found), found
    return [str(error) for error in found]


def test_ranks_that_describe_a_tensor_differently_are_named_on_all_ranks() -> None:
    def act(group: Group) -> Any:
        return describe({"w": Shard(torch.zeros(2 + (group.rank == 2)))}, group)

    assert len(set(failures(3, act))) == 1
    assert "w: rank 0 says" in failures(3, act)[0]
    assert "rank 2 says" in failures(3, act)[0]


SPLIT = plan_routes(
    [LogicalTensor("w", (8, 4), "float32"), LogicalTensor("v", (8, 4), "float32")],
    Placement({name: halves(0, (8, 4), 2) for name in "wv"}),
    Placement({name: halves(1, (8, 4), 3) for name in "wv"}),
)


def wrong(change: Callable[[Group, Tensors, Tensors], None]) -> list[str]:
    def act(group: Group) -> None:
        source, target = cut(SPLIT.tensors, SPLIT.source, group.rank), allocate(SPLIT.tensors, SPLIT.target, group.rank)
        change(group, source, target)
        before = {name: bits(tensor) for name, tensor in source.items()}
        try:
            reshard(SPLIT, source, target, group, QUICK)
        finally:
            assert {name: bits(tensor) for name, tensor in source.items()} == before

    return failures(3, act)


def pop(which: int, name: str) -> Callable[[Group, Tensors, Tensors], None]:
    def change(group: Group, *held: Tensors) -> None:
        if group.rank == 1:
            del held[which][name]

    return change


def put(which: int, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Group, Tensors, Tensors], None]:
    def change(group: Group, *held: Tensors) -> None:
        if group.rank == 1:
            held[which]["w"] = make(held[0])

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (pop(0, "w"), "rank 1: the source has no tensor w"),
        (pop(1, "v"), "rank 1: the target has no tensor v"),
        (put(1, lambda _: torch.zeros(8, 1)), "target w is float32 of shape (8, 1), its box [0:8, 2:4] needs float32"),
        (put(0, lambda _: torch.zeros(4, 4).double()), "source w is float64 of shape (4, 4)"),
        (put(1, lambda _: torch.zeros(8, 1).expand(8, 2)), "target w is expanded"),
        (put(1, lambda source: source["v"].view(8, 2)), "target w lies in memory of source v"),
    ],
)
def test_a_wrong_tensor_on_one_rank_is_an_error_on_all_before_anything_moves(
    change: Callable[[Group, Tensors, Tensors], None], says: str
) -> None:
    for error in wrong(change):
        assert says in error
        assert "rank 1" in error or "target w lies" in error


def test_an_unknown_tensor_and_targets_that_share_memory_are_refused() -> None:
    def more(group: Group, source: Tensors, _: Tensors) -> None:
        source["u"] = torch.zeros(1)

    def shared(group: Group, _: Tensors, target: Tensors) -> None:
        target["w"] = target["v"]

    assert all("brings u, which it has no box of" in error for error in wrong(more))
    assert all("targets v and w share memory" in error or "targets w and v" in error for error in wrong(shared))


def test_ranks_with_different_plans_or_options_do_not_start() -> None:
    other = plan_routes(SPLIT.tensors.values(), SPLIT.source, Placement({n: halves(0, (8, 4), 3) for n in "wv"}))

    def plans(group: Group) -> None:
        plan = other if group.rank == 2 else SPLIT
        reshard(
            plan, cut(plan.tensors, plan.source, group.rank), allocate(plan.tensors, plan.target, group.rank), group
        )

    def options(group: Group) -> None:
        chosen = Options(bucket_bytes=(1 << 20) + (group.rank == 2))
        source, target = cut(SPLIT.tensors, SPLIT.source, group.rank), allocate(SPLIT.tensors, SPLIT.target, group.rank)
        reshard(SPLIT, source, target, group, chosen)

    assert all("differ in the plan, the options" in error for error in failures(3, plans))
    assert all("differ in the plan, the options" in error for error in failures(3, options))


def test_an_error_while_packing_on_one_rank_is_an_error_on_all_and_the_group_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    this = threading.local()

    def failing(buffer: torch.Tensor, views: list[torch.Tensor]) -> None:
        if this.rank == 1:
            raise RuntimeError("no memory left")
        pack(buffer, views)

    def act(group: Group) -> str:
        this.rank = group.rank
        source, target = cut(SPLIT.tensors, SPLIT.source, group.rank), allocate(SPLIT.tensors, SPLIT.target, group.rank)
        with pytest.raises(TransitionError) as error:
            reshard(SPLIT, source, target, group, Options(timeout_s=20, read_memory=False))
        this.rank = -1
        reshard(SPLIT, source, target, group, Options(timeout_s=20, read_memory=False))
        wanted = cut(SPLIT.tensors, SPLIT.target, group.rank)
        assert all(bits(target[name]) == bits(tensor) for name, tensor in wanted.items())
        return str(error.value)

    monkeypatch.setattr(exchange, "pack", failing)
    assert each_rank(3, act) == ["rank 1: RuntimeError: no memory left"] * 3


def test_a_peer_that_never_comes_is_an_error_within_the_timeout() -> None:
    def act(group: Group) -> float:
        group.barrier()
        if group.rank == 2:
            time.sleep(3)
            return 0.0
        source, target = cut(SPLIT.tensors, SPLIT.source, group.rank), allocate(SPLIT.tensors, SPLIT.target, group.rank)
        began_s = time.monotonic()
        with pytest.raises(TransitionError, match="deadline of"):
            reshard(SPLIT, source, target, group, Options(timeout_s=0.7))
        return time.monotonic() - began_s

    waited = each_rank(3, act)
    assert all(isinstance(seconds, float) and seconds < 2.5 for seconds in waited), waited


@pytest.mark.parametrize("read_memory", [True, False])
def test_what_a_call_was_given_is_kept_by_nobody_after_it(read_memory: bool) -> None:
    def act(group: Group) -> bool:
        source, target = cut(SPLIT.tensors, SPLIT.source, group.rank), allocate(SPLIT.tensors, SPLIT.target, group.rank)
        known = [weakref.ref(tensor) for held in (source, target) for tensor in held.values()]
        reshard(SPLIT, source, target, group, Options(timeout_s=20, read_memory=read_memory))
        del source, target
        return len(known) > 0 and all(each() is None for each in known)

    gc.collect()
    gc.disable()
    try:
        assert each_rank(3, act) == [True] * 3
    finally:
        gc.enable()


def test_copies_that_differ_are_named_on_every_rank() -> None:
    tensors = [LogicalTensor("a", (6,), "float32"), LogicalTensor("norm", (8,), "bfloat16")]
    copies = {rank: Region.whole((8,)) for rank in range(3)}
    before = Placement({"a": {0: Region.whole((6,))}, "norm": copies})
    plan = plan_routes(tensors, before, Placement({"a": {1: Region.whole((6,))}, "norm": {3: Region.whole((8,))}}))

    def act(group: Group) -> None:
        source = cut(plan.tensors, plan.source, group.rank)
        if group.rank == 1:
            source["norm"][5] += 1
        reshard(plan, source, allocate(plan.tensors, plan.target, group.rank), group, QUICK)

    wanted = "copies of norm [0:8] differ: ranks [0, 2] and [1] hold different values"
    assert failures(4, act) == [wanted] * 4


def test_a_shard_changed_on_the_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(buffer: torch.Tensor, views: list[torch.Tensor]) -> None:
        pack(buffer, views)
        buffer[:8], buffer[8:16] = buffer[8:16].clone(), buffer[:8].clone()

    def act(group: Group) -> None:
        source, target = cut(SPLIT.tensors, SPLIT.source, group.rank), allocate(SPLIT.tensors, SPLIT.target, group.rank)
        reshard(SPLIT, source, target, group, replace(QUICK, read_memory=False))

    monkeypatch.setattr(exchange, "pack", spoiled)
    assert all("another hash after the transition" in error for error in failures(3, act))
