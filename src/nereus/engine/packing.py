"""Puts tensors of any dtype and any strides into one contiguous byte buffer, and takes them out again (D6.6).

Nothing is interpreted: elements are copied bit for bit, as integers of their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from nereus.engine.groups import as_bytes

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def pack(buffer: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Copy `views` into `buffer` (uint8), end to end."""
    for part, view in _parts(buffer, views, [view.dtype for view in views]):
        bits = _as_bits(view.resolve_conj().resolve_neg())
        if _aligned(part, bits):
            part.view(bits.dtype).view(bits.shape).copy_(bits)
        else:
            part.copy_(as_bytes(bits.contiguous()))


def unpack(buffer: torch.Tensor, views: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype] | None = None) -> None:
    """Copy what lies end to end in `buffer` into `views`; `dtypes` are those that travelled, the views' own if None."""
    dtypes = [view.dtype for view in views] if dtypes is None else dtypes
    for (part, view), dtype in zip(_parts(buffer, views, dtypes), dtypes, strict=True):
        same = view.dtype == dtype
        into = _as_bits(view) if same else view
        bits = into.dtype if same else dtype
        source = part if part.storage_offset() % bits.itemsize == 0 else part.clone()
        into.copy_(source.view(bits).view(into.shape))


def _parts(
    buffer: torch.Tensor, views: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    start = 0
    for view, dtype in zip(views, dtypes, strict=True):
        stop = start + view.numel() * dtype.itemsize
        yield buffer[start:stop], view
        start = stop


def _as_bits(view: torch.Tensor) -> torch.Tensor:
    return view.detach().view(_BITS[view.element_size()])


def _aligned(part: torch.Tensor, bits: torch.Tensor) -> bool:
    return bool(part.storage_offset() % bits.element_size() == 0)
