"""Ranks as processes of this machine with a default gloo group over loopback, to try and test code of several ranks."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
from torch import distributed

from nereus.core import TransportError

HOST = "127.0.0.1"
Main = Callable[..., Any]


def run_local(
    size: int, main: Main, *arguments: Any, timeout_s: float = 60.0, may_die: Collection[int] = ()
) -> list[Any]:
    """`main(rank, *arguments)` on every rank; results in rank order.

    Raises TransportError with the first rank's traceback, or when a rank dies or has not ended by the deadline. Every
    process has ended when this returns. The result of a rank that dies although it may is None.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "torch.optim", __name__])
    store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    deadline_s = time.monotonic() + timeout_s
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(theirs, rank, size, store.port, timeout_s, main, arguments), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _results(pipes, deadline_s, may_die)
    finally:
        for process in processes:
            process.join(max(0.0, min(2.0, deadline_s - time.monotonic())))
            if process.is_alive():
                process.kill()
                process.join()


def _results(pipes: list[Connection], deadline_s: float, may_die: Collection[int]) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        ready = wait(open_pipes, max(0.0, deadline_s - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in found]
            raise TransportError(f"ranks {late} have not ended by the deadline")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                done, value = pipes[rank].recv()
            except EOFError:
                if rank not in may_die:
                    raise TransportError(f"rank {rank} died") from None
                done, value = True, None
            if not done:
                raise TransportError(f"rank {rank} failed:\n{value}")
            found[rank] = value
    return [found[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Connection, rank: int, size: int, port: int, timeout_s: float, main: Main, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        store = distributed.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
        limit = timedelta(seconds=timeout_s)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        pipe.send((True, main(rank, *arguments)))
    except Exception:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # a group with a lost peer would keep the process
