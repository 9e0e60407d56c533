"""Rotary position embeddings, with Llama-3 frequency scaling."""

from __future__ import annotations

import math

import torch

from nereus.core import ModelSpec, RopeScaling


class RotaryTable:
    """Cosines and sines by position, grown on demand, as `rotate` wants them. Kept in the wide dtype (D5.9)."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        exponents = torch.arange(0, spec.head_dim, 2, dtype=dtype, device=device) / spec.head_dim
        self._frequencies = 1.0 / spec.rope_theta**exponents
        if spec.rope_scaling is not None:
            self._frequencies = _scaled(self._frequencies, spec.rope_scaling)
        self._cos = self._sin = self._frequencies.new_empty(0, 0)

    def up_to(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions 0 to length - 1, each [length, 1, head_dim]."""
        if length > self._cos.shape[0]:
            self._grow(max(length, 2 * self._cos.shape[0]))
        return self._cos[:length], self._sin[:length]

    def at(self, positions: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of one position a sequence, all below `limit`; each [b, 1, 1, head_dim]."""
        cos, sin = self.up_to(limit)
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    # A table made in inference mode could not be used in training.
    @torch.inference_mode(False)
    def _grow(self, length: int) -> None:
        positions = torch.arange(length, dtype=self._frequencies.dtype, device=self._frequencies.device)
        angles = (positions.unsqueeze(1) * self._frequencies).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        self._cos, self._sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [b, L, heads, head_dim] by its positions, in the dtype of the table; returns the dtype of `x`."""
    wide = x.to(cos.dtype)
    left, right = wide.chunk(2, dim=-1)
    return torch.addcmul(wide * cos, torch.cat((right, left), dim=-1), sin).to(x.dtype)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated."""
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)
