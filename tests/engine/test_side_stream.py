"""What is asked of a GPU, on a fake one: the order of streams, whose memory is kept, deadlines, aborts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nereus.core import TransportError
from nereus.engine.groups import Group
from nereus.engine.side_stream import beside

GPU = torch.device("cuda", 0)


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
