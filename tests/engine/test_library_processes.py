"""The library on real processes with groups of torch.distributed: the examples, a rank that dies, one that stalls."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import distributed

from examples import reshard_fsdp2, reshard_module
from nereus.core import TransitionError, TransportError
from nereus.engine import exchange
from nereus.engine.direct import Direct
from nereus.engine.library import LogicalTensor, Options, Placement, Region, allocate, plan_routes, reshard
from nereus.engine.library.local import run_local
from nereus.engine.packing import pack

pytestmark = pytest.mark.processes
DEADLINE_S = 90.0


def test_a_plain_module_with_adam_from_tp2_pp2_to_tp4_and_back() -> None:
    changes = [((2, 2), (4, 1)), ((4, 1), (2, 2))]
    by_rank = run_local(reshard_module.RANKS, reshard_module.rank_main, changes, timeout_s=DEADLINE_S)
    for results in zip(*by_rank, strict=True):
        state = results[0][2]
        moved = sum(received for _, received, _ in results)
        assert moved <= 0.52 * state, "half of the state, and copies of norms, biases and step counters"
        assert all(compared > 0 for compared, _, _ in results)


def test_fsdp2_from_four_ranks_to_two_and_back() -> None:
    by_rank = run_local(reshard_fsdp2.RANKS, reshard_fsdp2.rank_main, timeout_s=DEADLINE_S)
    shrink, grow = zip(*by_rank, strict=True)
    parameters = 2 * (len(reshard_fsdp2.SIZES) - 1)
    kinds = 4  # the value, two moments, the step
    assert [compared for compared, _, _ in shrink] == [parameters * kinds] * 2 + [0, 0]
    assert [received for _, received, _ in shrink[2:]] == [0, 0]
    assert [compared for compared, _, _ in grow[:2]] == [parameters * kinds] * 2
    assert all(received > 0 for _, received, _ in grow[2:])
    assert max(error for *_, error in (*shrink, *grow)) < 1e-5


PLAN = plan_routes(
    [LogicalTensor(name, (64, 96), "float32") for name in "abc"],
    Placement({name: {rank: Region.chunk((64, 96), 0, 2, rank) for rank in range(2)} for name in "abc"}),
    Placement({name: {rank: Region.chunk((64, 96), 1, 4, rank) for rank in range(4)} for name in "abc"}),
)


def broken_rank(rank: int, how: str, read_memory: bool) -> tuple[str, float, bool]:
    """Rank 1 breaks while it packs or reads; the others' error, how long they waited, and whether sources stayed."""
    source = {name: torch.full(box.shape, float(rank + 1)) for name, box in PLAN.source.of(rank).items()}
    distributed.barrier()

    broken: Any = Direct.pull if read_memory else pack

    def breaks(*arguments: Any) -> None:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        patch.undo()
        time.sleep(4)
        broken(*arguments)

    patch = pytest.MonkeyPatch()
    if rank == 1:
        where: tuple[object, str] = (Direct, "pull") if read_memory else (exchange, "pack")
        patch.setattr(*where, breaks)
    options = Options(timeout_s=2, read_memory=read_memory)
    began_s = time.monotonic()
    try:
        reshard(PLAN, source, allocate(PLAN.tensors, PLAN.target, rank), options=options)
    except TransitionError as error:
        stayed = all((tensor == rank + 1).all() for tensor in source.values())
        return str(error), time.monotonic() - began_s, stayed
    return "", 0.0, False


@pytest.mark.parametrize("read_memory", [True, False], ids=["reads", "packs"])
@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_rank_that_breaks_in_the_middle_is_an_error_on_every_other_within_the_timeout(
    how: str, read_memory: bool
) -> None:
    dead = (1,) if how == "dies" else ()
    results = run_local(4, broken_rank, how, read_memory, timeout_s=DEADLINE_S, may_die=dead)
    for rank, result in enumerate(results):
        if rank in dead:
            assert result is None
            continue
        error, waited_s, stayed = result
        assert "rank" in error
        assert stayed
        assert waited_s < 15


def crash(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("a bug of the caller")
    time.sleep(60)


def test_a_failing_rank_ends_the_others() -> None:
    began_s = time.monotonic()
    with pytest.raises(TransportError, match=r"rank 1 failed:[\s\S]*a bug of the caller"):
        run_local(2, crash, timeout_s=DEADLINE_S)
    assert time.monotonic() - began_s < 50
