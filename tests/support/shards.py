"""Tensors of random bits, and the shards of them that ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from nereus.engine.library import LogicalTensor, Placement, Region

Tensors = dict[str, torch.Tensor]
DTYPES = [
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "int64", "bool",
    "uint16", "complex64", "complex128",
]  # fmt: skip


def whole(tensor: LogicalTensor) -> torch.Tensor:
    """Random bits, equal for equal names; of bool only those that torch makes."""
    generator = torch.Generator().manual_seed(sum(map(ord, tensor.name)))
    size = prod(tensor.shape) * tensor.item_bytes
    raw = torch.randint(0, 2 if tensor.dtype == "bool" else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(getattr(torch, tensor.dtype)).view(tensor.shape)


def cut(tensors: Mapping[str, LogicalTensor], placement: Placement, rank: int) -> Tensors:
    """What a rank holds, as copies."""
    found = {}
    for name, box in placement.of(rank).items():
        found[name] = whole(tensors[name])[tuple(map(slice, box.start, box.stop))].clone()
    return found


def bits(tensor: torch.Tensor) -> list[int]:
    """Its bytes, in the order of its elements."""
    return list(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def halves(dim: int, shape: tuple[int, ...], ranks: int) -> dict[int, Region]:
    """Even parts along a dim, one for each rank."""
    return {rank: Region.chunk(shape, dim, ranks, rank) for rank in range(ranks)}
