"""Checks the tensors a rank brings against what the plan says of it, before anything moves."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nereus.core import TransitionError
from nereus.transition.boxes import BoxPlan, Placement
from nereus.transition.region import Region

Tensors = Mapping[str, torch.Tensor]
Boxes = Mapping[str, Region]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without the prefix, as `LogicalTensor.dtype`."""
    return str(dtype).removeprefix("torch.")


def check_tensors(plan: BoxPlan, placement: Placement, held: Tensors, rank: int, which: str) -> None:
    """Exactly the tensors of this rank's boxes, in their shapes and dtypes; a target's elements are all distinct."""
    boxes = placement.of(rank)
    missing, unknown = sorted(boxes.keys() - held.keys()), sorted(held.keys() - boxes.keys())
    if missing or unknown:
        what = f"has no tensor {missing[0]}" if missing else f"brings {unknown[0]}, which it has no box of"
        raise TransitionError(f"rank {rank}: the {which} {what}")
    places: dict[tuple[int, torch.device], str] = {}
    for name, box in boxes.items():
        tensor, wanted = held[name], plan.tensors[name].dtype
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TransitionError(f"rank {rank}: {which} {name} is a {type(tensor).__name__}; give its local tensor")
        if tuple(tensor.shape) != box.shape or dtype_name(tensor.dtype) != wanted:
            raise TransitionError(
                f"rank {rank}: {which} {name} is {dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}, "
                f"its box {box} needs {wanted} of shape {box.shape}"
            )
        if which == "target" and tensor.numel():
            if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
                raise TransitionError(f"rank {rank}: target {name} is expanded: several of its elements are one")
            other = places.setdefault((tensor.data_ptr(), tensor.device), name)
            if other != name:
                raise TransitionError(f"rank {rank}: targets {other} and {name} share memory; give it one name")


def check_sources_stay(source: Tensors, target: Tensors, now: Boxes, then: Boxes) -> None:
    """A target may lie in its own source's memory where it holds that very part; in no other: sources are only read."""
    by_storage: dict[object, list[str]] = {}
    for name, tensor in source.items():
        if tensor.numel():
            by_storage.setdefault(_storage(tensor), []).append(name)
    for name, tensor in target.items():
        own = now.get(name)
        stays = own is not None and own.common(then[name]) == then[name]
        if not tensor.numel() or (own is not None and stays and is_same(source[name][then[name].within(own)], tensor)):
            continue
        for other in by_storage.get(_storage(tensor), ()):
            if _overlap(tensor, source[other]):
                raise TransitionError(f"target {name} lies in memory of source {other}, which must stay as it is")


def is_same(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether both are one and the same view of memory."""
    same = source.data_ptr() == target.data_ptr() and source.device == target.device
    return bool(same and source.shape == target.shape and source.stride() == target.stride())


def _storage(tensor: torch.Tensor) -> tuple[int, torch.device]:
    return tensor.untyped_storage().data_ptr(), tensor.device


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the byte ranges that two tensors span meet."""
    (a_start, a_stop), (b_start, b_stop) = _span(a), _span(b)
    return a_start < b_stop and b_start < a_stop


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return (0, 0)
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
