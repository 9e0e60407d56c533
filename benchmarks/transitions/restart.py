"""What starting the processes again costs before any state is read: interpreters, torch, one group, one all-reduce."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from torch import distributed

from benchmarks.transitions.ranks import HOST, WAIT_S
from benchmarks.transitions.scenario import Scenario

PROGRAM = """
import sys, torch
from torch import distributed
port, rank, size = map(int, sys.argv[1:])
store = distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
distributed.all_reduce(torch.ones(1))
"""


class Side:
    """As many new processes as there are devices, each time."""

    def __init__(self, scenario: Scenario) -> None:
        self.size = scenario.devices

    def once(self) -> dict[str, Any]:
        """Until the last of them has ended."""
        store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        began_s = time.perf_counter()
        commands = [[sys.executable, "-c", PROGRAM, *map(str, (store.port, r, self.size))] for r in range(self.size)]
        started = [subprocess.Popen(command) for command in commands]
        try:
            codes = [process.wait(WAIT_S) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise RuntimeError(f"exit codes {codes}")
        return {"seconds": time.perf_counter() - began_s}

    def wrong(self) -> list[str]:
        """It moves nothing."""
        return []

    def rest(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is left."""
