"""Hashes of logical tensors that do not depend on how they are cut.

The hash of a tensor is the sum, modulo 2^64, of a hash of each element's bits and its flat index in the whole tensor: a
shard contributes its part, and an element in a wrong place changes the sum. Pieces with several owners are hashed by
each of them, and copies that differ are named.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from nereus.core import TransitionError
from nereus.engine.groups import as_bytes
from nereus.engine.library.peers import Peers
from nereus.transition.boxes import BoxPlan, Placement
from nereus.transition.region import Holders, Region, pieces

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_MASK = (1 << 64) - 1
_CHUNK = 1 << 20
"""Elements hashed at a time: an index of 8 bytes stands beside each."""


def digests(plan: BoxPlan, placement: Placement, held: Mapping[str, torch.Tensor], peers: Peers) -> dict[str, str]:
    """Name → hash of the whole tensor, on every rank. Raises TransitionError where copies differ."""
    mine, error = b"", None
    try:
        mine = _pack(_local(plan, placement, held, peers.rank))
    except RuntimeError as failure:
        error = f"rank {peers.rank}: hashing: {failure}"
    peers.agree(error)
    return dict(json.loads(peers.collect(mine, lambda parts: _merge(plan, placement, parts))))


def hash_box(tensor: torch.Tensor, region: Region, shape: tuple[int, ...], seed: int = 0) -> int:
    """Contribution of the elements of `region`, stored as `tensor`, to the hash of a tensor of `shape`."""
    if not region.elements:
        return 0
    rows = region.shape[region.row_dim] if region.shape else 1
    step = max(1, _CHUNK // (region.elements // rows))
    total = 0
    for start in range(0, rows, step):
        part = region.rows(start, min(start + step, rows))
        total += _hash(tensor[part.within(region)], part, shape, seed)
    return total & _MASK


def _hash(tensor: torch.Tensor, region: Region, shape: tuple[int, ...], seed: int) -> int:
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    bits = as_bytes(values).view(_BITS[values.element_size()]).to(torch.int64)
    if values.element_size() == 16:
        bits = bits[0::2] * _signed(0x9E3779B97F4A7C15) + bits[1::2]
    index = torch.zeros((), dtype=torch.int64, device=tensor.device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(region.start[dim], region.stop[dim], device=tensor.device) * stride
        index = index + along.reshape(-1, *(1,) * (len(shape) - dim - 1))
        stride *= shape[dim]
    return int(mix(mix(index.reshape(-1) + _signed(seed)) ^ bits).sum()) & _MASK


def mix(values: torch.Tensor) -> torch.Tensor:
    """Int64 values stirred by the finaliser of SplitMix64 (Steele, Lea, Flood 2014), on wrapping 64-bit integers."""
    values = values + _signed(0x9E3779B97F4A7C15)
    values = (values ^ _shift(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shift(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shift(values, 31)


def _shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Right, filled with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _cells(plan: BoxPlan, placement: Placement) -> Iterator[tuple[str, Region, tuple[int, ...]]]:
    """Every piece of every tensor with its owners, in one order on all ranks."""
    found: dict[object, list[tuple[Region, tuple[int, ...]]]] = {}
    for name, boxes in sorted(placement.boxes.items()):
        shape = plan.tensors[name].shape
        key = (shape, tuple(sorted(boxes.items())))
        if key not in found:
            by_box: dict[Region, list[int]] = {}
            for rank, box in sorted(boxes.items()):
                by_box.setdefault(box, []).append(rank)
            holders: Holders = [(box, tuple(ranks)) for box, ranks in by_box.items()]
            found[key] = [(part, owners) for part, owners in pieces(Region.whole(shape), holders) if owners]
        for part, owners in found[key]:
            yield name, part, owners


def _local(plan: BoxPlan, placement: Placement, held: Mapping[str, torch.Tensor], rank: int) -> list[int]:
    boxes = placement.of(rank)
    skipped = set(plan.fresh.get(rank, ())) if placement is plan.target else set()
    found: list[int] = []
    for name, part, owners in _cells(plan, placement):
        if rank in owners:
            view = held[name][part.within(boxes[name])]
            found.append(0 if name in skipped else hash_box(view, part, plan.tensors[name].shape))
    return found


def _pack(values: list[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def _merge(plan: BoxPlan, placement: Placement, parts: list[bytes]) -> bytes:
    given = [iter([part[i : i + 8] for i in range(0, len(part), 8)]) for part in parts]
    total: dict[str, int] = defaultdict(int)
    differ: list[str] = []
    for name, part, owners in _cells(plan, placement):
        by_value: dict[bytes, list[int]] = {}
        for rank in owners:
            by_value.setdefault(next(given[rank]), []).append(rank)
        if len(by_value) > 1:
            groups = " and ".join(str(ranks) for ranks in by_value.values())
            differ.append(f"copies of {name} {part} differ: ranks {groups} hold different values")
        total[name] = (total[name] + int.from_bytes(next(iter(by_value)), "little")) & _MASK
    if differ:
        more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
        raise TransitionError(differ[0] + more)
    return json.dumps({name: f"{value:016x}" for name, value in total.items()}).encode()
