"""One side of a comparison as a process of its own with ranks under it, told line by line what to do.

    python -m benchmarks.transitions.ranks MODULE:CLASS SCENARIO-JSON

The class is a `Work`, one for each rank, or a `Side` that starts its processes itself. After "run" a side answers with
one JSON line: seconds (slowest rank), bytes that its processes wrote to sockets and files, extra memory by rank;
"wrong" lists what differs, "rest" lets go of what the target took.
Needs torch alone. No process outlives the one that started it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed

from benchmarks.transitions.scenario import Scenario

WAIT_S, READY_S = 60.0, 170.0
"""No command takes longer, nor does a start."""
HOST = "127.0.0.1"


class Work(Protocol):
    """What one rank does. The default group has all ranks."""

    def __init__(self, rank: int, scenario: Scenario) -> None: ...

    def reset(self) -> None:
        """As before the first run: the source is there; what the target took is let go of."""
        ...

    def run(self) -> None:
        """The change of layout, timed."""
        ...

    def wrong(self) -> list[str]:
        """What of the target differs, after a run."""
        ...


class Side(Protocol):
    """A side that starts its processes itself."""

    def __init__(self, scenario: Scenario) -> None: ...

    def once(self) -> dict[str, Any]:
        """One run: at least `seconds`."""
        ...

    def wrong(self) -> list[str]:
        """What of the target differs, after a run."""
        ...

    def rest(self) -> None:
        """As before the first run, while others have their turn."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


class Ranks:
    """Processes of one default gloo group over loopback that wait for commands."""

    def __init__(self, work: str, scenario: Scenario, size: int, method: str = "fork") -> None:
        """With "fork", what this process has loaded is loaded in every rank."""
        context: Any = multiprocessing.get_context(method)
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, port, work, scenario.to_json())
            process = context.Process(target=_rank, args=arguments)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        listening = listener.detach()
        self._store = distributed.TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening
        )
        self._answers(READY_S)

    def call(self, command: str) -> list[Any]:
        """Every rank's answer. Raises RuntimeError with the first rank's error, or at the deadline."""
        for pipe in self._pipes:
            pipe.send(command)
        return self._answers()

    def once(self) -> dict[str, Any]:
        """One run on all ranks."""
        answers = self.call("run")
        return {
            "seconds": max(answer["seconds"] for answer in answers),
            "written_bytes": sum(answer["written_bytes"] for answer in answers),
            "extra_bytes": [answer["extra_bytes"] for answer in answers],
        } | {key: value for answer in answers for key, value in answer["more"].items()}

    def wrong(self) -> list[str]:
        """What differs on any rank."""
        return [f"rank {rank}: {name}" for rank, names in enumerate(self.call("wrong")) for name in names]

    def rest(self) -> None:
        """Each rank lets go of its target."""
        self.call("reset")

    def close(self) -> None:
        """End every rank."""
        for process in self._processes:
            process.kill()
            process.join(5.0)

    def _answers(self, limit_s: float = WAIT_S) -> list[Any]:
        found: dict[int, Any] = {}
        deadline_s = time.monotonic() + limit_s
        while len(found) < len(self._pipes):
            ready = wait([p for rank, p in enumerate(self._pipes) if rank not in found], deadline_s - time.monotonic())
            if not ready:
                late = sorted(set(range(len(self._pipes))) - found.keys())
                raise RuntimeError(f"ranks {late} gave no answer for {limit_s:g} s")
            for rank, pipe in enumerate(self._pipes):
                if pipe in ready:
                    try:
                        failed, found[rank] = pipe.recv()
                    except EOFError:
                        raise RuntimeError(f"rank {rank} died") from None
                    if failed:
                        raise RuntimeError(f"rank {rank}: {found[rank]}")
        return [found[rank] for rank in range(len(self._pipes))]


def _rank(pipe: Connection, rank: int, size: int, port: int, kind: str, scenario: str) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    try:
        store = distributed.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
        limit = timedelta(seconds=WAIT_S)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        module, _, name = kind.partition(":")
        work = getattr(importlib.import_module(module), name)(rank, Scenario.from_json(scenario))
        pipe.send((False, None))
        while True:
            command = pipe.recv()
            pipe.send((False, timed(work) if command == "run" else getattr(work, command)()))
    except EOFError:
        pass
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        pipe.send((True, f"{type(error).__name__}: {error}".splitlines()[0][:300]))
    os._exit(0)


def timed(work: Work) -> dict[str, Any]:
    """Seconds from the moment when all ranks are there until all are done, and what it took beside."""
    meter = Meter()
    distributed.barrier()
    began_s = time.perf_counter()
    work.run()
    distributed.barrier()
    seconds = time.perf_counter() - began_s
    return {"seconds": seconds, **meter.read(), "more": getattr(work, "more", {})}


class Meter:
    """Bytes that this process writes to sockets and files, and memory beyond what it had."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would hide what is taken
        Path("/proc/self/clear_refs").write_text("5")
        self._held = _status("VmRSS")
        self._written = _written()

    def read(self) -> dict[str, int]:
        """Since it was made."""
        return {"written_bytes": _written() - self._written, "extra_bytes": _status("VmHWM") - self._held}


def _written() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "wchar" in line)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def die_with_parent() -> None:
    """The kernel ends this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Answer commands until standard input ends."""
    die_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    scenario = Scenario.from_json(arguments[1])

    def answer(**told: Any) -> None:
        print(json.dumps(told), file=out, flush=True)

    side: Any = None
    try:
        module, _, name = arguments[0].partition(":")
        kind = getattr(importlib.import_module(module), name)
        side = kind(scenario) if hasattr(kind, "once") else Ranks(arguments[0], scenario, scenario.devices)
        answer(ready=True)
        for line in sys.stdin:
            match line.strip():
                case "run":
                    answer(**side.once())
                case "wrong":
                    answer(wrong=side.wrong())
                case _:
                    side.rest()
                    answer()
    except Exception as error:
        sys.excepthook(*sys.exc_info())
        answer(error=f"{type(error).__name__}: {error}".splitlines()[0][:300])
    finally:
        if side is not None:
            side.close()


if __name__ == "__main__":
    main(sys.argv[1:])
