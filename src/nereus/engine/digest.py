"""Hashes of a model-stage's state that do not depend on how it is cut: by the workers, and put together.

Every tensor and kind is cut at all places where any unit cuts it. A device hashes each piece it holds; the coordinator
compares the copies of a piece, and adds up one of each: the digest of the logical tensor, the same in any layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nereus.core import EMU, Kind, StateSchema, TensorSpec, TransitionError
from nereus.engine.groups import as_bytes
from nereus.engine.library.digest import hash_box, mix
from nereus.engine.positions import Position
from nereus.transition.region import Region

Marks = Mapping[str, tuple[int, ...]]
"""Tensor → the indices of its cut dim at which a piece starts or ends."""
Hashes = NDArray[np.uint64]
"""(pieces of the device, kinds), pieces in the order of `pieces_of`."""

LANES = 1 << 10
"""Words of 8 bytes that are added up before their place counts, in the quick hash."""
SLICE_BYTES = 1 << 24
_MASK = (1 << 64) - 1
_MULTIPLIER = 0x5851F42D4C957F2D
"""Of a 64-bit linear congruential generator (Knuth, MMIX)."""


def marks_of(schema: StateSchema, units: Iterable[EMU]) -> Marks:
    """Where the units cut each tensor that any of them cuts."""
    degrees = {unit.layout.tp for unit in units}
    found: dict[str, tuple[int, ...]] = {}
    for tensor in schema.tensors:
        ends = {end for tp in degrees for rank in range(tp) for end in tensor.interval(tp, rank)}
        found[tensor.name] = tuple(sorted(ends))
    return found


def pieces_of(schema: StateSchema, marks: Marks, unit: EMU, device: int) -> Iterator[tuple[TensorSpec, int, int, int]]:
    """(tensor, start, stop, first index the device stores) of every piece that `device` holds in `unit`."""
    for tensor, start, stop in schema.held(unit, device):
        for low, high in pairwise(marks[tensor.name]):
            if start <= low and high <= stop:
                yield tensor, low, high, start


def hashes(position: Position, device: int, marks: Marks, thorough: bool) -> Hashes:
    """What a device makes of its pieces. Not `thorough`: fast, enough to tell copies of one piece apart."""
    schema = position.schema
    rows = []
    for tensor, low, high, base in pieces_of(schema, marks, position.unit, device):
        dim = tensor.cut.dim or 0
        region = Region.along(tensor.shape, dim, low, high) if tensor.shape else Region.whole(())
        for kind in schema.dtypes:
            stored = position.tensors[tensor.name, kind]
            view = stored.narrow(dim, low - base, high - low) if tensor.shape else stored
            rows.append(hash_box(view, region, tensor.shape) if thorough else quick_hash(view))
    return np.array(rows, dtype=np.uint64).reshape(-1, len(schema.dtypes))


def quick_hash(view: torch.Tensor) -> int:
    """Of the bits of a tensor, at the speed of memory: sums of runs of words, each mixed with its place.

    Taken from slices, so that a strided tensor is never copied whole.
    """
    rows = view.shape[0] if view.dim() else 1
    step = max(1, rows * SLICE_BYTES // max(1, view.numel() * view.element_size()))
    total = 0
    for part in view.split(step) if view.dim() else (view,):
        total = (total * _MULTIPLIER + _slice_hash(part)) & _MASK
    return total


def _slice_hash(view: torch.Tensor) -> int:
    data = as_bytes(view.contiguous())
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64) if data.storage_offset() % 8 == 0 else data[:whole].clone().view(torch.int64)
    tail = int.from_bytes(data[whole:].cpu().numpy().tobytes(), "little")
    full = words.numel() // LANES * LANES
    sums = torch.cat([words[:full].view(-1, LANES).sum(1), words[full:], torch.tensor([tail], device=words.device)])
    place = torch.arange(sums.numel(), dtype=torch.int64, device=sums.device)
    return int(mix(mix(place) ^ sums).sum()) & _MASK


def digests(schema: StateSchema, marks: Marks, held: Mapping[int, tuple[EMU, Any]]) -> dict[tuple[str, Kind], int]:
    """The digest of each logical tensor and kind, of device → (its unit, its hashes).

    Raises TransitionError that names the tensor and the devices where copies differ.
    """
    kinds = tuple(schema.dtypes)
    first: dict[tuple[str, int], tuple[int, Any]] = {}
    total: dict[tuple[str, Kind], int] = {}
    for device, (unit, rows) in sorted(held.items()):
        for (tensor, low, high, _), row in zip(pieces_of(schema, marks, unit, device), rows, strict=True):
            other, same = first.setdefault((tensor.name, low), (device, row))
            for kind, mine, theirs in zip(kinds, row, same, strict=True):
                if mine != theirs:
                    raise TransitionError(
                        f"copies of {unit.model_stage} {tensor.name} {kind} [{low}, {high}) differ: "
                        f"devices {other} and {device} hold different values"
                    )
                if other == device:
                    total[tensor.name, kind] = (total.get((tensor.name, kind), 0) + int(mine)) & _MASK
    return total
