"""DTensor (FSDP2, tensor parallelism of torch) as shards: its local part, and which box of the whole that is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nereus.core import SettingsError
from nereus.engine.library.describe import Shard
from nereus.transition.region import Region


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part this rank stores, sharing its memory."""
    found = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return found.detach()


def place_of(name: str, tensor: torch.Tensor) -> tuple[tuple[int, ...], Region]:
    """Shape of the whole tensor and this rank's box. Plain tensors are whole."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), Region.whole(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise SettingsError(f"{name}: {tensor.placements} holds partial sums; reduce it first")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(tensor._local_tensor.shape) != tuple(shape):
        held = tuple(tensor._local_tensor.shape)
        raise SettingsError(f"{name}: rank stores {held}, {tensor.placements} of {tuple(tensor.shape)} says {shape}")
    start = tuple(min(low, size) for low, size in zip(offset, tensor.shape, strict=True))
    region = Region(start, tuple(low + size for low, size in zip(start, shape, strict=True)))
    return tuple(tensor.shape), region


def local_shards(shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """The same shards with local tensors in place of DTensors."""
    found: dict[str, Shard] = {}
    for name, shard in shards.items():
        if isinstance(shard.tensor, DTensor):
            shape, region = place_of(name, shard.tensor)
            found[name] = Shard(local_of(shard.tensor), shape, region, shard.attributes, shard.fresh)
        else:
            found[name] = shard
    return found


def wrap(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A moment beside its parameter: a DTensor placed as `like` is; state of another shape stays as it is."""
    if not isinstance(like, DTensor) or local.shape != like._local_tensor.shape:
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
