"""Ranks of a unit as threads of one process, each with its own gloo groups: gloo releases the GIL while it waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import distributed

from nereus.core import Layout
from nereus.engine.groups import GroupRegistry
from nereus.trainer.decoder.parallel import UnitGroups

T = TypeVar("T")
TIMEOUT_S = 30.0


def run_unit(layout: Layout, rank_main: Callable[[int, int, UnitGroups], T]) -> list[T]:
    """`rank_main(pp_rank, tp_rank, groups)` on every position at once; results in device order.

    The first error of any rank is raised; its closed groups end the waits of the others.
    """
    store = distributed.HashStore()

    def main(device: int) -> T:
        torch.set_num_threads(1)
        pp_rank, tp_rank = divmod(device, layout.tp)
        registry = GroupRegistry(store, device, TIMEOUT_S)
        try:
            row = [pp_rank * layout.tp + rank for rank in range(layout.tp)]
            column = [rank * layout.tp + tp_rank for rank in range(layout.pp)]
            tp = registry.make(f"tp of {pp_rank}", row) if layout.tp > 1 else None
            pp = registry.make(f"pp of {tp_rank}", column) if layout.pp > 1 else None
            return rank_main(pp_rank, tp_rank, UnitGroups(tp, pp))
        finally:
            registry.drop_all()

    with ThreadPoolExecutor(layout.size) as pool:
        futures = [pool.submit(main, device) for device in range(layout.size)]
    failures = [error for error in (future.exception() for future in futures) if error]
    if failures:
        raise next((error for error in failures if "Connection closed" not in str(error)), failures[0])
    return [future.result() for future in futures]
