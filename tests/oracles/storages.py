"""Counts live storages by walking objects: independent of the engine's ledger."""

from __future__ import annotations

import gc
from typing import Any

import torch


def live_storages() -> dict[int, int]:
    """Address → bytes of the storage of every tensor that Python can reach."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            _add(found, thing)
    return found


def graph_storages(root: torch.Tensor) -> dict[int, int]:
    """Address → bytes of the storage of every tensor that the graph of `root` has saved for its backward pass."""
    found: dict[int, int] = {}
    nodes: list[Any] = [root.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, torch.Tensor):
                        _add(found, item)
    return found


def _add(found: dict[int, int], tensor: torch.Tensor) -> None:
    if tensor.layout is torch.strided and tensor.device.type != "meta":
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
