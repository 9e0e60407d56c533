"""The keys and values of sequences under generation, on one position.

Sequences are aligned at the right: the newest token of every one stands in the same column, so that a decode step
writes one column and reads a prefix. Storage grows in blocks of tokens and shrinks when sequences leave.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from nereus.trainer.decoder.model import Attend, Decoder, causal

BLOCK_TOKENS = 16


class KVCache:
    """Keys and values [sequences, kv_heads, capacity, head_dim] of each local layer; `columns` of them are in use."""

    def __init__(self, decoder: Decoder, prompt_lengths: torch.Tensor) -> None:
        self._decoder = decoder
        self._layers = [_LayerCache(self) for _ in decoder.layers]
        self.columns = int(prompt_lengths.max())
        self.padding = self.columns - prompt_lengths
        self.capacity = _blocks(self.columns)
        self._update_mask()

    @property
    def prefill(self) -> Sequence[Attend]:
        """Attention over whole prompts, padded on the right, that keeps their keys and values."""
        return [layer.fill for layer in self._layers]

    @property
    def decode(self) -> Sequence[Attend]:
        """Attention of the newest token, which `advance` has made room for."""
        return [layer.append for layer in self._layers]

    def advance(self) -> None:
        """Make room for one more token of every sequence."""
        self.columns += 1
        if self.columns > self.capacity:
            self.capacity = _blocks(self.columns)
            for layer in self._layers:
                layer.resize(slice(None), 0, self.columns - 1)
            self._update_mask()

    def keep(self, rows: torch.Tensor) -> None:
        """Keep these sequences alone, and only the columns that one of them uses."""
        self.padding = self.padding[rows]
        unused = int(self.padding.min())
        self.padding = self.padding - unused
        self.columns -= unused
        self.capacity = _blocks(self.columns)
        for layer in self._layers:
            layer.resize(rows, unused, self.columns)
        self._update_mask()

    def allocate(self, sequences: int) -> torch.Tensor:
        """Storage of one layer's keys or values."""
        spec, decoder = self._decoder.spec, self._decoder
        shape = (sequences, decoder.kv_heads, self.capacity, spec.head_dim)
        storage = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        decoder.hooks.track("kv_cache", storage)
        return storage

    @property
    def mask(self) -> torch.Tensor | None:
        """Which of the columns in use each sequence may read; None when all may read all."""
        return None if self._mask is None else self._mask[..., : self.columns]

    def _update_mask(self) -> None:
        columns = torch.arange(self.capacity, device=self.padding.device)
        ragged = bool(self.padding.any())
        self._mask = (columns >= self.padding.unsqueeze(1))[:, None, None] if ragged else None


class _LayerCache:
    """One layer's keys and values."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._keys = self._values = torch.empty(0)

    def fill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keep the prompts' keys and values, moved to the right; plain causal attention."""
        self._keys, self._values = self._aligned(k), self._aligned(v)
        return causal(q, k, v)

    def append(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Add one token of every sequence and attend to all; query heads of a KV head go as its query positions."""
        used = self._cache.columns
        self._keys[:, :, used - 1 : used].copy_(k)
        self._values[:, :, used - 1 : used].copy_(v)
        grouped = q.reshape(len(q), self._keys.shape[1], -1, q.shape[-1])
        mixed = functional.scaled_dot_product_attention(
            grouped, self._keys[:, :, :used], self._values[:, :, :used], attn_mask=self._cache.mask
        )
        return mixed.reshape(q.shape)

    def resize(self, rows: torch.Tensor | slice, start: int, columns: int) -> None:
        """New storage with `rows` of the old and its columns from `start` on; `columns` of them are in use."""
        self._keys = self._moved(self._keys[rows], start, columns)
        self._values = self._moved(self._values[rows], start, columns)

    def _moved(self, old: torch.Tensor, start: int, columns: int) -> torch.Tensor:
        new = self._cache.allocate(len(old))
        new[:, :, :columns].copy_(old[:, :, start : start + columns])
        return new

    def _aligned(self, x: torch.Tensor) -> torch.Tensor:
        cache = self._cache
        storage = cache.allocate(len(x))
        # Columns left of a sequence repeat its first token: finite, and masked.
        source = (torch.arange(cache.columns, device=x.device) - cache.padding.unsqueeze(1)).clamp_(min=0)
        index = source[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        storage[:, :, : cache.columns].copy_(x.gather(2, index))
        return storage


def _blocks(columns: int) -> int:
    """Columns rounded up to whole blocks."""
    return -(-columns // BLOCK_TOKENS) * BLOCK_TOKENS
