"""Views of the parts of a fused tensor: each part is a logical tensor of its own, and moves in and out of its place.

Three packings are in use: parts end to end on each rank (gate and up, vLLM's q, k, v), groups that hold some rows of
each part (Megatron's q, k, v), and rows that alternate. None can be told from the shape: the framework says which.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nereus.core import SettingsError


def stacked(tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Parts of `sizes` indices of `dim`, end to end: `[q; k; v]` of this rank."""
    if sum(sizes) != tensor.shape[dim]:
        raise SettingsError(f"parts of {list(sizes)} rows make {sum(sizes)}, the tensor has {tensor.shape[dim]}")
    return tuple(torch.split(tensor.detach(), list(sizes), dim))


def grouped(tensor: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Parts of rows that come in groups, `sizes` rows of each part in every group: `q0 q1 k0 v0, q2 q3 k1 v1`.

    A part has shape (groups, its size, ...): groups are cut among ranks, never the rows of a group.
    """
    rows, whole = tensor.shape[0], sum(sizes)
    if rows % whole:
        raise SettingsError(f"{rows} rows are not whole groups of {whole} ({list(sizes)} of each part)")
    by_group = tensor.detach().unflatten(0, (rows // whole, whole))
    return tuple(torch.split(by_group, list(sizes), 1))


def interleaved(tensor: torch.Tensor, parts: int = 2) -> tuple[torch.Tensor, ...]:
    """Parts whose rows alternate: `gate0 up0 gate1 up1`. Each has shape (rows / parts, ...)."""
    return tuple(view.squeeze(1) for view in grouped(tensor, (1,) * parts))
