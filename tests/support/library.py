"""One transition by the library between shards that each rank writes down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nereus.core import NereusError, TransitionError
from nereus.engine.groups import Group
from nereus.engine.library import LogicalTensor, Options, Region, Report, Shard, describe, plan_routes, reshard
from tests.support.threads import each_rank

VERIFIED = Options(timeout_s=20, verify=True)


def move(
    group: Group, old: Mapping[str, Shard], new: Mapping[str, Shard], options: Options = VERIFIED
) -> tuple[dict[str, LogicalTensor], Report]:
    """Fill the tensors of `new` on every rank from those of `old`."""
    tensors, source = describe(old, group)
    later, target = describe(new, group)
    plan = plan_routes({**later, **tensors}.values(), source, target)
    return tensors, reshard(plan, bare(old), bare(new), group, options)


def bare(shards: Mapping[str, Shard]) -> dict[str, torch.Tensor]:
    """The tensors alone."""
    return {name: shard.tensor for name, shard in shards.items()}


def rows(full: torch.Tensor, parts: int, index: int, dim: int = 0) -> Shard:
    """Part `index` of a tensor cut evenly along a dim, as a copy."""
    region = Region.chunk(tuple(full.shape), dim, parts, index)
    return Shard(full[tuple(map(slice, region.start, region.stop))].clone(), tuple(full.shape), region)


def empty(like: Shard) -> Shard:
    """The same part, not filled yet."""
    return Shard(torch.full_like(like.tensor, 77), like.shape, like.region, like.attributes, like.fresh)


def numbered(*shape: int) -> torch.Tensor:
    """Every element its flat index."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def ran(size: int, act: Callable[[Group], Any]) -> list[Any]:
    """`act` on every rank; the first error is raised."""
    found = each_rank(size, act)
    for result in found:
        if isinstance(result, NereusError):
            raise result
    return found


def failures(size: int, act: Callable[[Group], Any]) -> list[str]:
    """What every rank says; all must fail."""
    found = each_rank(size, act)
    assert all(isinstance(error, TransitionError) for error in found), found
    return [str(error) for error in found]
