"""What is asked of a GPU, on a fake one: the order of streams, whose memory is kept, deadlines, aborts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from nereus.core import TransportError
from nereus.engine import groups
from nereus.engine.groups import Group
from nereus.engine.side_stream import beside
from nereus.engine.worker import DeviceSettings, Worker, WorkerSettings

GPU = torch.device("cuda", 0)
NCCL_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class FakeCuda:
    """Notes what it is asked for; an event has happened after it was asked `busy` times."""

    def __init__(self, busy: int = 0) -> None:
        self.diary: list[str] = []
        self.busy = busy
        self.asked = 0

    def Stream(self, _: torch.device) -> FakeCuda:
        return self

    def Event(self) -> FakeCuda:
        return self

    def current_stream(self, _: torch.device) -> str:
        return "current"

    def wait_stream(self, other: str) -> None:
        self.diary.append(f"wait for {other}")

    @contextmanager
    def stream(self, _: FakeCuda) -> Iterator[None]:
        self.diary.append("enter")
        yield
        self.diary.append("leave")

    def record(self, _: FakeCuda) -> None:
        self.diary.append("event")

    def query(self) -> bool:
        self.asked += 1
        return self.asked > self.busy


class FakeTensor:
    """On the fake device, or on the host."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self.kept_for: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.kept_for.append(stream)


def test_the_side_stream_starts_after_earlier_work_and_the_host_waits_for_its_end() -> None:
    cuda, tensors = FakeCuda(busy=3), [FakeTensor(True), FakeTensor(False)]
    with beside(GPU, tensors, lambda: 1.0, cuda):
        cuda.diary.append("work")
    assert cuda.diary == ["wait for current", "enter", "work", "event", "leave"]
    assert cuda.asked == 4
    assert [tensor.kept_for for tensor in tensors] == [[cuda], []]


def test_work_that_does_not_end_is_an_error_at_the_deadline() -> None:
    cuda, left = FakeCuda(busy=10**9), iter([2.0, 1.0, 0.0])
    with pytest.raises(TransportError, match="by the deadline"), beside(GPU, [], lambda: next(left), cuda):
        pass
    assert cuda.asked == 3


def test_memory_is_kept_where_the_work_fails_and_nobody_waits_for_the_device() -> None:
    cuda, tensor = FakeCuda(busy=10**9), FakeTensor(True)
    with pytest.raises(TransportError, match="peer"), beside(GPU, [tensor], lambda: 1.0, cuda):
        raise TransportError("the peer is gone")
    assert tensor.kept_for == [cuda]
    assert cuda.asked == 0


class FakeNccl:
    """A process group that notes what it is asked for."""

    def __init__(self) -> None:
        self.diary: list[Any] = []

    def _start_coalescing(self) -> None:
        self.diary.append("start")

    def _end_coalescing(self) -> FakeNccl:
        self.diary.append("end")
        return self

    def send(self, *_: Any) -> FakeNccl:
        self.diary.append("send")
        return self

    def barrier(self, options: distributed.BarrierOptions) -> FakeNccl:
        self.diary.append(options.device_ids)
        return self

    def wait(self, limit: timedelta | None = None) -> None:
        self.diary.append(None if limit is None else limit.total_seconds())


class Strided(FakeTensor):
    """Part of a tensor on the fake device."""

    shape, device = (2, 2), GPU

    def numel(self) -> int:
        return 4

    def is_contiguous(self) -> bool:
        return False

    def stride(self) -> tuple[int, int]:
        return (1, 2)


def test_a_batch_that_fails_is_ended_all_the_same() -> None:
    """An open one would hold back whatever the thread starts later, in other groups too."""
    nccl = FakeNccl()
    tensors: list[Any] = [Strided(True)]
    with pytest.raises(TransportError, match="only contiguous"):
        Group("g", (0, 1), 0, nccl, True).post([(1, tensors[0])], [])
    assert nccl.diary == ["start", "end"]


@pytest.mark.parametrize(("on_cuda", "allowed_s"), [(True, 60.0), (False, 20.0)])
def test_a_transfer_started_long_ago_has_all_that_is_left(
    on_cuda: bool, allowed_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's work takes a limit from its own start, gloo's from the call."""
    now_s = [100.0]
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    nccl = FakeNccl()
    handle = Group("g", (0, 1), 0, nccl, on_cuda).isend(torch.zeros(1), 1)
    now_s[0] = 140.0
    handle.wait(20.0)
    assert nccl.diary == ["send", allowed_s]


def test_a_barrier_on_cuda_is_one_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    diaries = []
    for on_cuda in (True, False):
        nccl = FakeNccl()
        Group("g", (0, 1), 0, nccl, on_cuda).barrier()
        diaries.append(nccl.diary)
    assert diaries == [[[5], None], [[], None]]


def test_a_worker_of_a_gpu_makes_it_current_and_outlives_the_errors_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv(NCCL_HANDLING, raising=False)
    monkeypatch.setenv("KEPT", "")  # what the worker sets is taken back afterwards
    monkeypatch.setattr(os, "environ", dict(os.environ))
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name in ("cuda:1", "cpu"):
        limits = DeviceSettings(torch_device=name)
        Worker(WorkerSettings(0, limits, 20.0, "none", None, "127.0.0.1", store.port))
        assert chosen == [torch.device("cuda:1")]
        assert os.environ[NCCL_HANDLING] == "0"


class FakeCommunicators:
    """A process group whose abort ends only once all others are being aborted as well."""

    def __init__(self, together: threading.Barrier, done: list[str], name: str) -> None:
        self._together, self._done, self._name = together, done, name

    def abort(self) -> None:
        self._together.wait(timeout=20)
        self._done.append(self._name)


@pytest.mark.timeout(60)
def test_communicators_of_a_group_are_aborted_at_the_same_time_and_nobody_waits() -> None:
    """nccl#1013, #1777: aborting one while the kernel of another runs hung for ever."""
    together, done = threading.Barrier(3), list[str]()
    made: list[Any] = [FakeCommunicators(together, done, name) for name in ("up", "down")]
    group = Group("g", (0, 1), 0, made[0], True, made[1])
    before = set(threading.enumerate())
    group.close()
    assert done == [], "both still wait for the third"
    with pytest.raises(TransportError, match="closed"):
        group.barrier()
    FakeCommunicators(together, done, "another").abort()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert sorted(done) == ["another", "down", "up"]
