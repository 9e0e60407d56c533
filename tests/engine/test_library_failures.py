"""The engine as a library, on threads: what fails on one rank fails on all, with what is wrong and where."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from nereus.core import TransitionError
from nereus.engine import exchange
from nereus.engine.direct import Direct
from nereus.engine.groups import Group
from nereus.engine.library import (
    LogicalTensor,
    Options,
    Placement,
    Region,
    Shard,
    allocate,
    describe,
    plan_routes,
    reshard,
)
from nereus.engine.packing import pack
from tests.support.library import VERIFIED, failures
from tests.support.shards import Tensors, bits, cut, halves
from tests.support.threads import each_rank


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
            reshard(SPLIT, source, target, group, VERIFIED)
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
        reshard(plan, source, allocate(plan.tensors, plan.target, group.rank), group, VERIFIED)

    wanted = "copies of norm [0:8] differ: ranks [0, 2] and [1] hold different values"
    assert failures(4, act) == [wanted] * 4


def test_a_shard_changed_on_the_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(buffer: torch.Tensor, views: list[torch.Tensor]) -> None:
        pack(buffer, views)
        buffer[:8], buffer[8:16] = buffer[8:16].clone(), buffer[:8].clone()

    def act(group: Group) -> None:
        source, target = cut(SPLIT.tensors, SPLIT.source, group.rank), allocate(SPLIT.tensors, SPLIT.target, group.rank)
        reshard(SPLIT, source, target, group, replace(VERIFIED, read_memory=False))

    monkeypatch.setattr(exchange, "pack", spoiled)
    assert all("another hash after the transition" in error for error in failures(3, act))


def test_what_is_read_from_a_rank_past_its_deadline_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 4 begins a second before the others, and its caller writes over its sources as soon as it has failed.

    Rank 1 reads them after that, in time by its own clock; none of those it hears verdicts from is late either.
    """
    early, late, shape = 4, 1, (8, 8)
    plan = plan_routes(
        [LogicalTensor("w", shape, "float32")],
        Placement({"w": halves(0, shape, 8)}),
        Placement({"w": halves(1, shape, 8)}),
    )
    begun, given_back = threading.Event(), threading.Event()
    pull = Direct.pull

    def waits(direct: Direct, rank: int) -> None:
        if direct._transport.rank == late:
            given_back.wait(10)
        pull(direct, rank)

    def act(group: Group) -> None:
        source, target = cut(plan.tensors, plan.source, group.rank), allocate(plan.tensors, plan.target, group.rank)
        if group.rank == early:
            begun.set()
        else:
            begun.wait(10)
            time.sleep(1)
        try:
            reshard(plan, source, target, group, Options(timeout_s=2))
        finally:
            if group.rank == early:
                source["w"].fill_(0)
                given_back.set()

    monkeypatch.setattr(Direct, "pull", waits)
    assert len(failures(8, act)) == 8
