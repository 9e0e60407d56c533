"""Starts worker processes on this machine from a fork server that has torch loaded: one is up in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from nereus.engine.worker import WorkerSettings, run_worker

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""torch asks for huge pages for large tensors, malloc for the others: the first touch of fresh memory costs less."""
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.optim", "numpy", "nereus.engine.worker")


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker process and the pipe to it."""

    process: ForkServerProcess
    connection: Connection


@contextmanager
def signals_wait() -> Iterator[None]:
    """SIGINT and SIGTERM take effect after the block: a worker told half of what it is to do would fail aloud."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for early in arrived:
            signal.raise_signal(early)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that are not set otherwise, for children started meanwhile alone."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def launch(settings: WorkerSettings) -> Launched:
    """Start the worker of one device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_worker, args=(settings, theirs), name=f"nereus-device-{settings.device}", daemon=True
    )
    with _environment(HUGE_PAGES):  # read by the fork server, which the first worker starts
        process.start()
    theirs.close()  # so that the end of the process ends the pipe
    return Launched(process, ours)
