"""Reads parts of this process's tensors out of the memory of another process of the host.

Owns what a source tells of its views (an address and strides for each), in how much memory at once they are read, and
what goes by way of a scratch buffer: parts that are stored in another dtype, and parts in tiny pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from nereus.engine.messages import Part, Parts, limited
from nereus.engine.transports.attach import MOST_CALL_BYTES, Process, Segments, alike, runs, segments

Numbers = NDArray[np.int64]
"""Address and strides of each of some parts, one after the other."""
LEAST_RUN_BYTES = 256
"""Smaller pieces cost more one by one than what is packed and sent."""
FEW_PIECES = 64
"""So many of them cost nothing to speak of in one part."""
BATCH_PIECES = 1 << 15
"""So many are listed at once: a megabyte."""
SCRATCH_BYTES = 1 << 19
"""What is converted or in tiny pieces is read so many bytes at once, which stay in the cache until they are copied."""
MOST_PIECES = 4096
"""So many of them a source offers to one rank: a millisecond or two."""


def readable(parts: Parts) -> list[Part]:
    """The same elements in parts of which none is more than one call reads, the same on both sides; none is empty."""
    whole = [(part, MOST_CALL_BYTES // _item_bytes(part) * part.dtype.itemsize) for part in parts if part.view.numel()]
    return [small for part, limit in whole for small in limited(part, limit)]


def scratch_bytes(parts: Parts, room_bytes: int) -> int:
    """Size of the scratch buffer that reading `parts` needs, at most `room_bytes`."""
    staged = max((part.view.numel() * _item_bytes(part) for part in parts if _staged(part)), default=0)
    return min(staged, room_bytes, SCRATCH_BYTES)


def offer(parts: Parts) -> Numbers:
    """What a source tells of its `parts`; zeros where they cannot be read as they are."""
    told = np.array([number for part in parts for number in (part.view.data_ptr(), *part.view.stride())], np.int64)
    found = [_pieces(part.view, part.stored or part.dtype) for part in parts]
    pieces = sum(MOST_PIECES + 1 if each is None else tiny(*each) for each in found)
    return told if pieces <= MOST_PIECES else np.zeros_like(told)


def tiny(count: int, size_bytes: int) -> int:
    """How many small pieces, of `count` of a size."""
    return count if size_bytes < LEAST_RUN_BYTES else 0


def pull(process: Process, parts: Parts, offered: Numbers, scratch: torch.Tensor) -> None:
    """Fill `parts`, which are `readable`, from what a process has offered. Raises TransportError."""
    batch: list[tuple[Segments, Segments]] = []
    listed = 0
    for part, (address, strides) in zip(parts, _each(offered, parts), strict=True):
        if _staged(part):
            _convert(process, part, address, strides, scratch)
            continue
        there = segments(address, tuple(part.view.shape), strides, part.dtype.itemsize)
        batch.append(alike(_places(part.view), there))
        listed += len(batch[-1][0])
        if listed >= BATCH_PIECES:
            _read(process, batch)
            listed = 0
    _read(process, batch)


def _convert(process: Process, part: Part, address: int, strides: tuple[int, ...], scratch: torch.Tensor) -> None:
    """By way of the scratch buffer, as much at once as it takes."""
    stored = part.stored or part.dtype
    limit = scratch.numel() // _item_bytes(part) * part.dtype.itemsize
    like = replace(part, view=torch.empty_strided(part.view.shape, strides, dtype=stored, device="meta"))
    for mine, theirs in zip(limited(part, limit), limited(like, limit), strict=True):
        view, shape = theirs.view, tuple(theirs.view.shape)
        start = address + view.storage_offset() * stored.itemsize
        read = scratch[: view.numel() * stored.itemsize].view(stored).view(shape)
        process.read(*alike(_places(read), segments(start, shape, view.stride(), stored.itemsize)))
        mine.view.copy_(read.to(part.dtype) if mine.view.dtype != part.dtype else read)


def _read(process: Process, batch: list[tuple[Segments, Segments]]) -> None:
    """What is listed, which is none afterwards."""
    if batch:
        process.read(*(np.concatenate(side) for side in zip(*batch, strict=True)))
    batch.clear()


def _item_bytes(part: Part) -> int:
    """Of an element where that is widest: as it is stored by the source, or as it travels."""
    travels, stored = part.dtype, part.stored or part.dtype
    return int(max(travels.itemsize, stored.itemsize))


def _pieces(view: torch.Tensor, dtype: torch.dtype) -> tuple[int, int] | None:
    """(pieces, bytes of each) of a view in this process's memory; None where that does not hold elements of `dtype`."""
    if view.device.type != "cpu" or view.dtype != dtype or view.is_conj() or view.is_neg():
        return None
    return runs(tuple(view.shape), view.stride(), view.element_size())


def _staged(part: Part) -> bool:
    """Whether a part is read by way of the scratch buffer."""
    found = _pieces(part.view, part.dtype) if part.stored in (None, part.dtype) else None
    return found is None or tiny(*found) > FEW_PIECES


def _places(view: torch.Tensor) -> Segments:
    return segments(view.data_ptr(), tuple(view.shape), view.stride(), view.element_size())


def _each(told: Numbers, parts: Sequence[Part]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Address and strides of the other side's views, which have the shapes of ours."""
    start = 0
    for part in parts:
        address, *strides = told[start : start + 1 + part.view.dim()].tolist()
        yield address, tuple(strides)
        start += 1 + part.view.dim()
