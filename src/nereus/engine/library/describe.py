"""What each rank holds, told to all: the framework describes its own shards, nobody needs to know a layout.

A framework that can compute every rank's boxes builds `LogicalTensor`s and a `Placement` itself and skips this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nereus.core import SettingsError, TransitionError
from nereus.engine.library.check import dtype_name
from nereus.engine.library.peers import AnyGroup, Peers
from nereus.transition.boxes import BoxPlan, LogicalTensor, Placement
from nereus.transition.region import Region

Regions = dict[str, list[list[list[int]]]]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a logical tensor. `region` None: all of it. `shape` None: the tensor is the whole one."""

    tensor: torch.Tensor
    shape: tuple[int, ...] | None = None
    region: Region | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.tensor.shape) if self.shape is None else tuple(self.shape)

    @property
    def box(self) -> Region:
        """What of it this rank holds."""
        return Region.whole(self.logical_shape) if self.region is None else self.region

    def logical(self, name: str) -> LogicalTensor:
        """The whole tensor under a name."""
        return LogicalTensor(name, self.logical_shape, dtype_name(self.tensor.dtype), self.attributes, self.fresh)


def describe(
    held: Mapping[str, Shard],
    group: AnyGroup = None,
    timeout_s: float = 60.0,
    replica: int | None = None,
) -> tuple[dict[str, LogicalTensor], Placement]:
    """All tensors of all ranks and who holds what, on every rank. Collective over the group.

    `replica` is the number of the copy that this rank belongs to, on all ranks or on none. Raises TransitionError on
    every rank where two ranks describe a tensor differently.
    """
    peers = Peers(group, timeout_s)
    mine, error = b"", None
    try:
        mine = _encode(held, replica)
    except SettingsError as failure:
        error = f"rank {peers.rank}: {failure}"
    peers.agree(error)
    return _decode(peers.collect(mine, _merge))


def _encode(held: Mapping[str, Shard], replica: int | None) -> bytes:
    entries: dict[str, Any] = {}
    for name, shard in held.items():
        logical = shard.logical(name)
        what = [logical.shape, logical.dtype, logical.fresh, dict(logical.attributes)]
        try:
            entries[name] = [json.dumps(what, sort_keys=True), [shard.box.start, shard.box.stop]]
        except TypeError as error:
            raise SettingsError(f"tensor {name}: attributes must be JSON values: {error}") from None
    return json.dumps({"tensors": entries, "replica": replica}).encode()


def _merge(parts: list[bytes]) -> bytes:
    """One description of each tensor; equal boxes are listed once with their ranks."""
    tensors: dict[str, str] = {}
    first: dict[str, int] = {}
    boxes: dict[str, list[Any]] = {}
    replicas: dict[int, int] = {}
    for rank, part in enumerate(parts):
        told = json.loads(part)
        if told["tensors"] and told["replica"] is not None:
            replicas[rank] = told["replica"]
        for name, (what, box) in told["tensors"].items():
            if tensors.setdefault(name, what) != what:
                raise TransitionError(
                    f"{name}: rank {first[name]} says {tensors[name]}, rank {rank} says {what} "
                    "(shape, dtype, fresh, attributes)"
                )
            first.setdefault(name, rank)
            boxes.setdefault(name, []).append([rank, *box])
    return json.dumps({"tensors": tensors, "boxes": boxes, "replicas": list(replicas.items())}).encode()


def _decode(data: bytes) -> tuple[dict[str, LogicalTensor], Placement]:
    told = json.loads(data)
    tensors: dict[str, LogicalTensor] = {}
    for name, what in told["tensors"].items():
        shape, dtype, fresh, attributes = json.loads(what)
        tensors[name] = LogicalTensor(name, tuple(shape), dtype, attributes, fresh)
    boxes = {
        name: {rank: Region(tuple(start), tuple(stop)) for rank, start, stop in entries}
        for name, entries in told["boxes"].items()
    }
    return tensors, Placement(boxes, dict(told["replicas"]))


def allocate(
    tensors: Mapping[str, LogicalTensor],
    placement: Placement,
    rank: int,
    device: torch.device | str = "cpu",
    keep: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Empty tensors for a rank's boxes, zero-size ones included; those of `keep` are taken as they are."""
    kept = keep or {}
    return {
        name: kept[name]
        if name in kept
        else torch.empty(box.shape, dtype=getattr(torch, tensors[name].dtype), device=device)
        for name, box in placement.of(rank).items()
    }


def staying(plan: BoxPlan, held: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Targets that are contiguous parts of what this rank holds already, as views, to be given to `allocate` as `keep`.

    They are not copied; in return the whole of their source stays in memory for as long as they do.
    """
    now, then = plan.source.of(rank), plan.target.of(rank)
    found: dict[str, torch.Tensor] = {}
    for name, box in then.items():
        own = now.get(name)
        if own is not None and own.common(box) == box:
            view = held[name].detach()[box.within(own)]
            if view.is_contiguous():
                found[name] = view
    return found
