"""Groups on threads of one process: each thread has its own registry and its own client of the store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from nereus.core import TransportError
from nereus.engine import groups
from nereus.engine.groups import Group, GroupRegistry, lost_key, tell_lost


@pytest.fixture
def store() -> distributed.TCPStore:
    return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def on_each(
    store: distributed.TCPStore, devices: Sequence[int], act: Callable[[Group], Any], timeout_s: float = 10
) -> list[Any]:
    """`act` on every member of one group, at the same time; an error is returned in place of a result."""

    def run(device: int) -> Any:
        client = distributed.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        registry = GroupRegistry(client, device, timeout_s)
        try:
            return act(registry.make("unit.1", devices))
        except TransportError as error:
            return error
        finally:
            registry.drop_all()

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(run, devices))


def test_a_process_may_end_right_after_its_groups(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "from tests.engine.test_groups import *\n"
        "store = distributed.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(on_each(store, [0, 1], lambda group: group.rank))\n"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, timeout=120
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, b"[0, 1]"), ended.stderr


def test_all_reduce_sums_in_place(store: distributed.TCPStore) -> None:
    def act(group: Group) -> torch.Tensor:
        tensor = torch.full((3,), float(group.rank + 1))
        group.all_reduce(tensor)
        return tensor

    for result in on_each(store, [5, 2, 9], act):
        assert result.tolist() == [6.0] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.float8_e4m3fn])
def test_bytes_of_any_dtype_travel(store: distributed.TCPStore, dtype: torch.dtype) -> None:
    def act(group: Group) -> tuple[Any, Any, Any]:
        mine = torch.tensor([group.rank, 1 - group.rank, 1]).to(dtype)
        gathered = [part.float().tolist() for part in group.all_gather(mine)]
        other = torch.zeros(3, dtype=dtype)
        group.exchange([(1 - group.rank, mine)], [(1 - group.rank, other)])
        group.broadcast(mine, 1)
        return gathered, other.float().tolist(), mine.float().tolist()

    results = on_each(store, [0, 1], act)
    for rank, (gathered, other, root) in enumerate(results):
        assert gathered == [[0, 1, 1], [1, 0, 1]]
        assert other == [1 - rank, rank, 1]
        assert root == [1, 0, 1]


def test_exchange_keeps_the_order_of_a_pair_and_skips_empty_tensors(store: distributed.TCPStore) -> None:
    def act(group: Group) -> list[list[float]]:
        peers = [rank for rank in range(group.size) if rank != group.rank]
        sends = [(peer, torch.full((n,), 100.0 * group.rank + n)) for peer in peers for n in (0, 1, 2)]
        receives = [(peer, torch.zeros(n)) for peer in reversed(peers) for n in (0, 1, 2)]
        group.exchange(sends, receives)
        group.exchange([], [])
        return [tensor.tolist() for _, tensor in receives]

    for rank, got in enumerate(on_each(store, [0, 1, 2], act)):
        peers = [peer for peer in (2, 1, 0) if peer != rank]
        assert got == [[100.0 * peer + n] * n for peer in peers for n in (0, 1, 2)]


def test_a_strided_tensor_is_refused(store: distributed.TCPStore) -> None:
    results = on_each(store, [0], lambda group: group.broadcast(torch.zeros(4, 4).t(), 0))
    assert "only contiguous" in str(results[0])


def test_a_group_of_one_needs_no_peer(store: distributed.TCPStore) -> None:
    def act(group: Group) -> list[float]:
        tensor = torch.ones(2)
        group.all_reduce(tensor)
        group.barrier()
        group.broadcast(tensor, 0)
        return [value for part in group.all_gather(tensor) for value in part.tolist()]

    assert on_each(store, [7], act) == [[1.0, 1.0]]


def test_closing_a_group_unblocks_the_peer_even_while_others_hold_the_wrapper(store: distributed.TCPStore) -> None:
    kept: list[Group] = []

    def act(group: Group) -> float:
        group.barrier()
        started = time.monotonic()
        if group.rank == 0:
            kept.append(group)
            pending = group.irecv(torch.zeros(1), 1)
            group.close()
            with pytest.raises(TransportError, match="closed"):
                pending.wait()
            return 0.0
        with pytest.raises(TransportError, match=r"unit\.1"):
            group.recv(torch.zeros(1), 0)
        return time.monotonic() - started

    waited_s = on_each(store, [0, 1], act, timeout_s=30)[1]
    assert waited_s < 15, "the peer waited for its deadline instead of the closed socket"


def test_a_silent_peer_becomes_an_error_at_the_deadline(store: distributed.TCPStore) -> None:
    def act(group: Group) -> None:
        group.barrier()
        if group.rank == 0:
            group.recv(torch.zeros(1), 1)
        else:
            time.sleep(1.5)

    error = on_each(store, [0, 1], act, timeout_s=0.5)[0]
    assert isinstance(error, TransportError)
    assert "unit.1" in str(error)


def test_members_wait_for_one_that_is_late_and_not_for_one_that_is_lost(store: distributed.TCPStore) -> None:
    registry = GroupRegistry(store, 0, 60)
    tell_lost(store, 7, "of another group")
    tell_lost(store, 2, "it was killed")
    with pytest.raises(TransportError, match=r"group unit\.2: device 2 was lost before it came"):
        registry.make("unit.2", (0, 1, 2))
    store.delete_key(lost_key(2))
    with pytest.raises(TransportError, match=r"group unit\.3: devices \[1, 2\] did not come within 0\.2 s"):
        GroupRegistry(store, 0, 0.2).make("unit.3", (0, 1, 2))
    assert registry.names == ()


@pytest.mark.timeout(120)
def test_meeting_and_connecting_have_one_deadline(store: distributed.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 1 comes in the last moment of ten minutes, and never connects."""
    passed_s = [0.0]

    def arrive(_: float) -> None:
        passed_s[0] = 599.7
        store.add("late#1/come", 1)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0], sleep=arrive)
    monkeypatch.setattr(groups, "time", clock)
    with pytest.raises(TransportError, match=r"group late#1: members \[0, 1\] did not all come"):
        GroupRegistry(store, 0, 600).make("late#1", (0, 1))


def test_transfers_have_longer_than_was_left_to_connect(store: distributed.TCPStore) -> None:
    found = on_each(store, [0, 1], lambda group: group._process_group.options._timeout.total_seconds(), timeout_s=50)
    assert found == [50.0, 50.0]


def test_who_has_come_and_is_lost_since_is_noticed_by_its_socket(store: distributed.TCPStore) -> None:
    def act(group: Group) -> None:
        if group.rank == 1:
            tell_lost(store, 1, "later")
        else:
            group.all_reduce(torch.ones(1))

    assert isinstance(on_each(store, [0, 1], act, timeout_s=60)[0], TransportError)


def test_the_registry_names_what_it_has(store: distributed.TCPStore) -> None:
    registry = GroupRegistry(store, 3, 5)
    registry.make("a", [3])
    with pytest.raises(TransportError, match="valid: a"):
        registry.get("b")
    with pytest.raises(TransportError, match="exists already"):
        registry.make("a", [3])
    with pytest.raises(TransportError, match="not among"):
        registry.make("c", [1, 2])
    registry.drop("a")
    registry.drop("a")
    assert registry.names == ()


class Lane:
    """A process group that only notes what it is given."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, int]] = []

    def send(self, _: list[torch.Tensor], to: int, _tag: int) -> None:
        self.noted.append(("to", to))

    def recv(self, _: list[torch.Tensor], source: int, _tag: int) -> None:
        self.noted.append(("from", source))


def test_both_directions_of_a_pair_have_a_queue_each_where_there_are_two() -> None:
    """In one queue, two neighbours that send to each other before they receive would wait for ever."""
    value = torch.zeros(1)
    lanes = {}
    for rank in (1, 2):
        up, down = lanes[rank] = Lane(), Lane()
        group = Group("pp", (0, 1, 2, 3), rank, up, down=down)
        peer = 3 - rank
        group.isend(value, peer)
        group.irecv(value, peer)
    assert (lanes[1][0].noted, lanes[1][1].noted) == ([("to", 2)], [("from", 2)])
    assert (lanes[2][0].noted, lanes[2][1].noted) == ([("from", 1)], [("to", 1)])
