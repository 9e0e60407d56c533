"""Reading another process's memory: any view bit for bit, and never another process than the one that was met."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import TransportError
from nereus.engine.transports import attach
from nereus.engine.transports.attach import CARD_BYTES, Process, alike, card, find, runs, segments

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
)
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="cross-memory attach is Linux's")


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], overlapping: bool) -> torch.Tensor:
    """A view of bytes of its own: dims in any order, steps between elements, with `overlapping` some of step 0."""
    stride, reach = [0] * len(shape), 0
    for dim in draw(st.permutations(range(len(shape)))):
        if not (overlapping and draw(st.booleans())):
            stride[dim] = (reach + 1) * draw(st.integers(1, 2)) + draw(st.integers(0, 1))
        reach += (shape[dim] - 1) * stride[dim]
    offset = draw(st.integers(0, 3))
    return torch.empty(offset + reach + 1).as_strided(shape, stride, offset)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target of one shape and dtype, the target's elements all distinct."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    dtype = draw(st.sampled_from(DTYPES))
    found = []
    for overlapping in (True, False):
        like = draw(views(shape, overlapping))
        room = like.untyped_storage().nbytes() // 4
        storage = torch.from_numpy(np.frombuffer(os.urandom(room * dtype.itemsize), np.uint8).copy())
        storage = storage.bitwise_and(1) if dtype is torch.bool else storage
        found.append(storage.view(dtype).as_strided(shape, like.stride(), like.storage_offset()))
    return found[0], found[1]


def places(view: torch.Tensor) -> attach.Segments:
    return segments(view.data_ptr(), tuple(view.shape), view.stride(), view.element_size())


def elements(view: torch.Tensor) -> list[int]:
    """The address of every byte, index by index."""
    starts = (
        view.data_ptr() + view.element_size() * sum(i * step for i, step in zip(index, view.stride(), strict=True))
        for index in product(*map(range, view.shape))
    )
    return [start + byte for start in starts for byte in range(view.element_size())]


def own_bytes(view: torch.Tensor) -> bytes:
    return b"".join(ctypes.string_at(address, 1) for address in elements(view))


@given(pairs())
def test_any_view_is_read_into_any_view_bit_for_bit(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, target = pair
    wanted = own_bytes(source)
    around = {address: ctypes.string_at(address, 1) for address in _storage(target)}
    me = find(card())
    assert me is not None
    me.read(*alike(places(target), places(source)))
    assert own_bytes(target) == wanted
    outside = around.keys() - set(elements(target))
    assert all(ctypes.string_at(address, 1) == around[address] for address in outside)


def _storage(view: torch.Tensor) -> range:
    start = view.untyped_storage().data_ptr()
    return range(start, start + view.untyped_storage().nbytes())


@given(pairs())
def test_segments_are_the_bytes_of_the_elements_in_their_order(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    for view in pair:
        found = [address + byte for address, size in places(view).tolist() for byte in range(size)]
        assert found == elements(view)
        assert len(places(view)) == runs(tuple(view.shape), view.stride(), view.element_size())[0]


def test_what_is_contiguous_is_one_segment_and_a_cut_of_columns_one_a_row() -> None:
    whole = torch.zeros(6, 8)
    assert places(whole).tolist() == [[whole.data_ptr(), 192]]
    assert places(whole[2:4]).tolist() == [[whole.data_ptr() + 64, 64]]
    assert places(whole[:, 4:]).tolist() == [[whole.data_ptr() + 32 * row + 16, 16] for row in range(6)]


def test_more_pieces_and_bytes_than_one_call_takes_are_read_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.arange(10_000.0).view(5_000, 2)[:, 0], torch.zeros(5_000)
    calls: list[int] = []
    real = attach._vm_readv()

    def counted(pid: int, here: int, ours: int, there: int, theirs: int, flags: int) -> int:
        calls.append(ours)
        return real(pid, here, ours, there, theirs, flags)

    me = find(card())
    assert me is not None
    monkeypatch.setattr(attach, "_vm_readv", lambda: counted)
    me.read(*alike(places(target), places(source)))
    assert torch.equal(target, source)
    assert len(calls) == 5
    assert max(calls) == 1024
    calls.clear()
    monkeypatch.setattr(attach, "MOST_CALL_BYTES", 4_000)
    target.zero_()
    me.read(*alike(places(target), places(source)))
    assert torch.equal(target, source)
    assert calls == [1001] * 5


def refused(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    return call


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ESRCH, errno.EFAULT])
def test_a_kernel_that_refuses_is_no_neighbour_and_an_error_later(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    me, source, target = find(card()), torch.zeros(3), torch.zeros(3)
    assert me is not None
    monkeypatch.setattr(attach, "_vm_readv", lambda: refused(number))
    assert find(card()) is None
    words = "has ended" if number == errno.ESRCH else errno.errorcode[number]
    with pytest.raises(TransportError, match=f"memory of process {os.getpid()}: .*{words}"):
        me.read(places(target), places(source))


def test_a_short_read_is_no_neighbour_and_an_error_later(monkeypatch: pytest.MonkeyPatch) -> None:
    me, source, target = find(card()), torch.zeros(3), torch.zeros(3)
    assert me is not None
    real = attach._vm_readv()
    monkeypatch.setattr(attach, "_vm_readv", lambda: lambda *arguments: real(*arguments) - 1)
    assert find(card()) is None
    with pytest.raises(TransportError, match="27 of 28 bytes could be read"):
        me.read(places(target), places(source))


def changed(part: str, with_what: object) -> bytes:
    names = ("host", "namespace", "pid", "address", "mark")
    found = dict(zip(names, attach._CARD.unpack(card()), strict=True)) | {part: with_what}
    return attach._CARD.pack(*found.values())


@pytest.mark.parametrize(
    ("part", "with_what"),
    [("host", b"another host ..."), ("namespace", 1), ("mark", b"another process."), ("address", 8)],
)
def test_a_card_of_another_host_or_process_is_refused(part: str, with_what: object) -> None:
    assert find(changed(part, with_what)) is None


def test_no_card_is_no_neighbour() -> None:
    assert find(bytes(CARD_BYTES)) is None


@pytest.fixture
def permits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str | None, int], list[tuple[int, ...]]]]:
    """What a process asks of the kernel under a scope of Yama's (None: there is no Yama), as the child of a process."""

    def asked(scope: str | None, parent: int) -> list[tuple[int, ...]]:
        calls: list[tuple[int, ...]] = []

        def prctl(option: int, *numbers: ctypes.c_ulong) -> int:
            assert all(isinstance(number, ctypes.c_ulong) for number in numbers), "an int would be cut to 32 bits"
            calls.append((option, *(number.value for number in numbers)))
            return -1  # as of a kernel that does not know it

        file = tmp_path / "ptrace_scope"
        if scope is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(scope)
        with monkeypatch.context() as patched:
            patched.setattr(attach, "_YAMA", file)
            patched.setattr(os, "getppid", lambda: parent)
            patched.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(prctl=prctl))
            attach._permit.cache_clear()
            first, again = card(), card()
        assert first == again
        assert find(first) is not None
        return calls

    yield asked
    attach._permit.cache_clear()


def test_under_yamas_scope_1_a_process_permits_its_parent_and_so_its_siblings_once(
    permits: Callable[[str | None, int], list[tuple[int, ...]]],
) -> None:
    """PR_SET_PTRACER names a process; it and all that descend from it may then read (kernel's Yama documentation)."""
    assert permits("1\n", 4242) == [(0x59616D61, 4242, 0, 0, 0)]


@pytest.mark.parametrize(("scope", "parent"), [(None, 4242), ("0\n", 4242), ("2\n", 4242), ("3\n", 4242), ("1\n", 1)])
def test_elsewhere_nothing_is_asked_nor_for_the_children_of_process_1(
    permits: Callable[[str | None, int], list[tuple[int, ...]]], scope: str | None, parent: int
) -> None:
    """Scope 0 needs nothing, 2 and 3 give nothing, and the children of process 1 are everybody."""
    assert permits(scope, parent) == []


def test_a_fork_asks_again_as_its_permission_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    attach._permit()
    assert attach._permit.cache_info().currsize == 1
    before = attach._mark.copy()
    monkeypatch.setattr(attach, "_mark", attach._mark.copy())
    attach._renew()
    assert attach._permit.cache_info().currsize == 0
    assert (attach._mark != before).any()


OTHER = """
import ctypes, os, sys
import numpy as np
from nereus.engine.transports.attach import card
data = np.arange(1000, dtype=np.int64)
print(card().hex(), data.ctypes.data, flush=True)
sys.stdin.readline()
child = os.fork()
if not child:
    print(card().hex(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
sys.stdin.readline()
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@pytest.mark.processes
def test_another_process_is_read_until_it_ends_and_never_one_that_has_its_pid(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    assert other.stdin is not None
    told, address = other.stdout.readline().split()
    met = find(bytes.fromhex(told))
    assert met is not None
    assert met.pid == other.pid
    target = torch.zeros(1000, dtype=torch.int64)
    theirs = segments(int(address), (1000,), (1,), 8)
    met.read(places(target), theirs)
    assert torch.equal(target, torch.arange(1000))
    again = Process(met.pid, attach._CARD.unpack(bytes.fromhex(told))[3], b"of one before it")
    with pytest.raises(TransportError, match=f"process {met.pid} is not the one that was met"):
        again.read(places(target), theirs)
    other.stdin.write("fork\n")
    other.stdin.flush()
    child = attach._CARD.unpack(bytes.fromhex(other.stdout.readline()))
    parent = attach._CARD.unpack(bytes.fromhex(told))
    assert child[2] != parent[2]
    assert child[4] != parent[4], "a fork has a mark of its own"
    other.kill()
    other.wait()
    with pytest.raises(TransportError, match="the process has ended"):
        met.read(places(target), theirs)


def test_processes_are_together_on_one_host_with_the_same_pids() -> None:
    mine, nobody = attach.card(), bytes(attach.CARD_BYTES)
    host, pids, *rest = attach._CARD.unpack(mine)
    other = bytes(each ^ 1 for each in host)
    assert attach.together(mine, attach._CARD.pack(host, pids, *rest[:-1], bytes(16)))
    assert not attach.together(mine, attach._CARD.pack(other, pids, *rest))
    assert not attach.together(mine, attach._CARD.pack(host, pids + 1, *rest))
    assert not attach.together(mine, nobody)
    assert not attach.together(nobody, nobody)
