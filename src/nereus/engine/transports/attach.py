"""Reads the memory of another process of this host: one copy, from its tensor into ours (Linux, cross-memory attach).

Owns the system call and the proof of whom it reads. A process tells its host, its pid and the place of a random mark;
whoever reads finds that mark with every call, so a pid that has been given to another process is never taken for it.
The kernel asks for the right to trace: the same user, and under Yama's `ptrace_scope` 1 a permission that a process
gives to its parent and the parent's other children. Where the kernel refuses, nothing is read.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable, Iterator
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.core import TransportError

Segments = NDArray[np.int64]
"""Rows of (address, bytes): pieces of memory, end to end."""

MOST_SEGMENTS = 1023
"""Of one call: the kernel's IOV_MAX, and one for the mark."""
MOST_CALL_BYTES = 1 << 28
"""Of one call; the kernel would end one of 2 GiB early."""
_CARD = struct.Struct("=16sqqq16s")
CARD_BYTES = _CARD.size
_MARK_BYTES = 16
_PR_SET_PTRACER = 0x59616D61
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

_mark = np.frombuffer(bytearray(os.urandom(_MARK_BYTES)), np.uint8)
"""Random; where it lies is told with it."""


def _renew() -> None:
    _mark[:] = np.frombuffer(os.urandom(_MARK_BYTES), np.uint8)
    _permit.cache_clear()
    _place.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)  # a child has this memory too, and is another process


def card() -> bytes:
    """What others need to find this process; all zeros where there is no such thing."""
    try:
        host, namespace = _place()
        _permit()
    except (OSError, ValueError):
        return bytes(CARD_BYTES)
    return _CARD.pack(host, namespace, os.getpid(), _mark.ctypes.data, _mark.tobytes())


def find(theirs: bytes) -> Process | None:
    """The process of a card where this one may read its memory: same host, same pids, and the mark is there."""
    if not together(theirs, card()):
        return None
    _, _, pid, address, mark = _CARD.unpack(theirs)
    found = Process(pid, address, mark)
    empty = np.empty((0, 2), np.int64)
    try:
        found.read(empty, empty)
    except TransportError:
        return None
    return found


def together(one: bytes, other: bytes) -> bool:
    """Whether two cards are of processes that see the same host and pids; not where one of them is of nobody."""
    first, second = _CARD.unpack(one)[:2], _CARD.unpack(other)[:2]
    return any(first[0]) and first == second


class Process:
    """A process whose memory can be read."""

    def __init__(self, pid: int, address: int, mark: bytes) -> None:
        self.pid = pid
        self._mark = mark
        self._seen = np.zeros(_MARK_BYTES, np.uint8)
        self._mark_here = np.array([[self._seen.ctypes.data, _MARK_BYTES]], np.int64)
        self._mark_there = np.array([[address, _MARK_BYTES]], np.int64)

    def read(self, ours: Segments, theirs: Segments) -> None:
        """Copy `theirs` to `ours`: as many segments on both sides, those of a row of equal size.

        Raises TransportError where the process is gone, is another one, or its memory cannot be read.
        """
        for start, stop in _calls(theirs[:, 1]):
            self._call(ours[start:stop], theirs[start:stop])

    def _call(self, ours: Segments, theirs: Segments) -> None:
        here, there = np.concatenate([self._mark_here, ours]), np.concatenate([self._mark_there, theirs])
        wanted = int(there[:, 1].sum())
        self._seen[:] = 0
        got = _vm_readv()(self.pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        if got < 0:
            raise TransportError(f"memory of process {self.pid}: {_named(ctypes.get_errno())}")
        if got != wanted:
            raise TransportError(f"memory of process {self.pid}: {got:,} of {wanted:,} bytes could be read")
        if self._seen.tobytes() != self._mark:
            raise TransportError(f"process {self.pid} is not the one that was met: its mark is missing")


def runs(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> tuple[int, int]:
    """(pieces, bytes of each) that a view's memory is made of. `strides` in elements."""
    count, run = 1, item_bytes
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and count == 1 and step * item_bytes == run:
            run *= size
        else:
            count *= size
    return count, run


def segments(address: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> Segments:
    """The memory of a view in the order of its elements, in as few pieces as `runs` says."""
    count, run = runs(shape, strides, item_bytes)
    if count == 1:
        return np.array([[address, run]], np.int64)
    starts = np.array([address], np.int64)
    within = item_bytes
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if within < run:
            within *= size
        elif size > 1:
            starts = (np.arange(size, dtype=np.int64)[:, None] * (step * item_bytes) + starts).reshape(-1)
    return np.stack([starts, np.full_like(starts, run)], axis=1)


def alike(first: Segments, second: Segments) -> tuple[Segments, Segments]:
    """Both cut into pieces of one size; each has pieces of one size before."""
    if first[0, 1] == second[0, 1]:
        return first, second
    size = gcd(int(first[0, 1]), int(second[0, 1]))
    return _cut(first, size), _cut(second, size)


def _cut(pieces: Segments, size: int) -> Segments:
    run = int(pieces[0, 1])
    starts = (pieces[:, :1] + np.arange(0, run, size, dtype=np.int64)).reshape(-1)
    return np.stack([starts, np.full_like(starts, size)], axis=1)


def _calls(sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Rows of each call; one call for no rows at all."""
    if not len(sizes):
        yield 0, 0
        return
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        fits = int(np.searchsorted(ends, before + MOST_CALL_BYTES, "right"))
        stop = min(start + MOST_SEGMENTS, max(start + 1, fits))
        yield start, stop
        start = stop


@cache
def _vm_readv() -> Callable[..., int]:
    """The system call, or one that always fails where there is none."""
    call: Any = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None or not sys.platform.startswith("linux"):
        return _missing
    call.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = (ctypes.c_int, pointer, count, pointer, count, ctypes.c_ulong)
    return call  # type: ignore[no-any-return]


def _missing(*_: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


@cache
def _place() -> tuple[bytes, int]:
    """Number of this host's boot, and of this process's namespace of pids."""
    host = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    return host, os.stat("/proc/self/ns/pid").st_ino


@cache
def _permit() -> None:
    """Under Yama's scope 1: this process's siblings, which the ranks of one launcher are, may read its memory.

    Not where the parent is process 1, whose children are everybody.
    """
    parent = os.getppid()
    if parent > 1 and _YAMA.exists() and _YAMA.read_text().strip() == "1":
        unsigned = ctypes.c_ulong
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, unsigned(parent), unsigned(0), unsigned(0), unsigned(0))


def _named(number: int) -> str:
    if number == errno.ESRCH:
        return "the process has ended"
    return f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"
