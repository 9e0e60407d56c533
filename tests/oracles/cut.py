"""What every device must hold: the logical tensors cut into a layout by arithmetic of its own.

Written apart from the implementation: it works on single indices of a dim and never asks the vocabulary for an
interval, a local shape or a range of layers. Every element is a function of (tensor name, kind, flat logical index),
exact in every dtype and never zero, so padding, swapped shards and swapped kinds all show.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from nereus.core import EMU, Kind, StateSchema, TensorSpec

_DTYPES = {"fp64": "f8", "fp32": "f4", "fp16": "f2", "bf16": "u2", "int64": "i8"}
_PERIOD = {"fp64": 2**40 - 87, "fp32": 2**23 - 15, "fp16": 2039, "bf16": 65521, "int64": 2**40 - 87}
Values = Callable[[StateSchema, TensorSpec, Kind], np.ndarray[Any, Any]]
_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int64": 8}


def logical(schema: StateSchema, tensor: TensorSpec, kind: Kind) -> np.ndarray[Any, Any]:
    """The whole tensor of one kind."""
    return _values(f"{tensor.name}|{kind.value}", tensor.shape, schema.dtypes[kind])


@lru_cache(maxsize=4096)
def _values(key: str, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    values = (zlib.crc32(key.encode()) + 7 * np.arange(prod(shape), dtype=np.int64)) % _PERIOD[dtype] + 1
    return values.astype(_DTYPES[dtype]).reshape(shape)


def cut(
    schema: StateSchema, unit: EMU, device: int, whole: Values = logical
) -> dict[tuple[str, Kind], np.ndarray[Any, Any]]:
    """The local shards of `device` in `unit`, zero padding included; `whole` gives the logical tensors."""
    found: dict[tuple[str, Kind], np.ndarray[Any, Any]] = {}
    for tensor in _held(schema, unit, device):
        rows, pad = _rows(tensor, unit, device)
        dim = tensor.cut.dim or 0
        for kind in schema.dtypes:
            local = np.take(whole(schema, tensor, kind), rows, axis=dim)
            zeros = np.zeros([pad if axis == dim else size for axis, size in enumerate(local.shape)], local.dtype)
            found[tensor.name, kind] = np.concatenate([local, zeros], axis=dim)
    return found


def lacks_bytes(schema: StateSchema, start: Iterable[EMU], goal: EMU, device: int) -> int:
    """Bytes of `device`'s share of `goal` that it does not hold in any unit of `start`."""
    have: dict[str, set[int]] = {}
    for unit in start:
        if device in unit.devices:
            for tensor in _held(schema, unit, device):
                have.setdefault(tensor.name, set()).update(_rows(tensor, unit, device)[0])
    total = 0
    for tensor in _held(schema, goal, device):
        missing = set(_rows(tensor, goal, device)[0]) - have.get(tensor.name, set())
        row = prod(size for axis, size in enumerate(tensor.shape) if axis != (tensor.cut.dim or 0))
        total += len(missing) * row * sum(_BYTES[dtype] for dtype in schema.dtypes.values())
    return total


def _held(schema: StateSchema, unit: EMU, device: int) -> list[TensorSpec]:
    pp = unit.layout.pp
    mine = unit.devices.index(device) // unit.layout.tp
    counts = list(unit.layout.stage_layers or [])
    if not counts:
        counts = [0] * pp
        for layer in range(schema.layers):
            counts[layer % pp] += 1
        counts.sort(reverse=True)
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    found = []
    for tensor in schema.tensors:
        where = tensor.where.value
        stages = {
            "layer": [stage_of[tensor.layer]] if tensor.layer is not None else [],
            "first": [0],
            "last": [pp - 1],
            "both_ends": [0, pp - 1],
        }[where]
        if mine in stages:
            found.append(tensor)
    return found


def _rows(tensor: TensorSpec, unit: EMU, device: int) -> tuple[list[int], int]:
    """Logical indices of the cut dim that the device owns, in order, and how many rows of padding follow."""
    tp = unit.layout.tp
    rank = unit.devices.index(device) % tp
    if tensor.cut.dim is None:
        return list(range(tensor.shape[0])), 0
    length, blocks = tensor.shape[tensor.cut.dim], tensor.cut.blocks
    size = length // blocks
    if tensor.cut.padded:
        chunk = blocks // tp + (1 if blocks % tp else 0)
        mine = [block for block in range(rank * chunk, rank * chunk + chunk) if block < blocks]
        pad = (chunk - len(mine)) * size
    elif tensor.cut.replicated and blocks < tp:
        mine, pad = [b for b in range(blocks) if b * tp <= rank * blocks < (b + 1) * tp], 0
    else:
        sizes = [len(range(r, blocks, tp)) for r in range(tp)]
        mine, pad = list(range(sum(sizes[:rank]), sum(sizes[: rank + 1]))), 0
    return [block * size + offset for block in mine for offset in range(size)], pad
