"""Ranks as threads of one process, with gloo groups of the engine between them: a waiting gloo releases the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import distributed

from nereus.core import NereusError
from nereus.engine.groups import Group, GroupRegistry

T = TypeVar("T")


def each_rank(size: int, act: Callable[[Group], T], timeout_s: float = 30.0) -> list[T | NereusError]:
    """`act` on every rank of one group at the same time; an error of ours is returned in place of a result."""
    store = distributed.HashStore()

    def main(rank: int) -> T | NereusError:
        registry = GroupRegistry(store, rank, timeout_s)
        try:
            return act(registry.make("ranks", range(size)))
        except NereusError as error:
            return error
        finally:
            registry.drop_all()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(main, range(size)))
