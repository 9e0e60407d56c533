"""The keys and values of sequences under generation, on one position.

Sequences are aligned at the right: the newest token of every one stands in the same column, so that a decode step
writes one column and reads a prefix. Storage is made anew for each block of tokens, for the sequences and columns
still in use; in between, the last sequences take the places of those that left.
"""

from __future__ import annotations

import weakref
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
        self.sequences = len(prompt_lengths)
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
        if self.columns == self.capacity:
            self._renew()
        self.columns += 1

    def keep(self, staying: Sequence[int]) -> list[int]:
        """Keep the sequences at these places (ascending) alone; returns the former place of each one in its new order.

        Whole rows are copied only into the places of sequences that left, since some leave at almost every step.
        """
        self.sequences = len(staying)
        here = sum(place < self.sequences for place in staying)
        order = list(range(self.sequences))
        gaps, last = sorted(set(order) - set(staying)), staying[here:]
        for gap, place in zip(gaps, last, strict=True):
            order[gap] = place
        for layer in self._layers:
            layer.fill_gaps(gaps, last, self.columns)
        self.padding = self.padding[order]
        self._update_mask()
        return order

    def _renew(self) -> None:
        """Storage with room for another token, without the sequences that left and the columns that none uses."""
        unused = int(self.padding.min())
        self.padding = self.padding - unused
        self.columns -= unused
        self.capacity = _blocks(self.columns + 1)
        for layer in self._layers:
            layer.renew(unused)
        self._update_mask()

    def allocate(self) -> torch.Tensor:
        """Storage of one layer's keys or values."""
        spec, decoder = self._decoder.spec, self._decoder
        shape = (self.sequences, decoder.kv_heads, self.capacity, spec.head_dim)
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
        self._cache = weakref.proxy(cache)  # no cycle: the memory is free as soon as the generation ends
        self._keys = self._values = torch.empty(0)

    def fill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keep the prompts' keys and values, moved to the right; plain causal attention."""
        self._keys, self._values = self._aligned(k), self._aligned(v)
        return causal(q, k, v)

    def append(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Add one token of every sequence and attend to all; query heads of a KV head go as its query positions."""
        used = self._cache.columns
        keys, values = (storage[: len(q), :, :used] for storage in (self._keys, self._values))
        keys[:, :, -1:].copy_(k)
        values[:, :, -1:].copy_(v)
        grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
        mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._cache.mask)
        return mixed.reshape(q.shape)

    def fill_gaps(self, gaps: Sequence[int], last: Sequence[int], columns: int) -> None:
        """Copy the columns in use of the rows `last` into the rows `gaps`."""
        for storage in (self._keys, self._values):
            for gap, row in zip(gaps, last, strict=True):
                storage[gap, :, :columns].copy_(storage[row, :, :columns])

    def renew(self, start: int) -> None:
        """New storage with the sequences in use and their columns from `start` on."""
        self._keys, self._values = self._moved(self._keys, start), self._moved(self._values, start)

    def _moved(self, old: torch.Tensor, start: int) -> torch.Tensor:
        new, columns = self._cache.allocate(), self._cache.columns
        new[:, :, :columns].copy_(old[: len(new), :, start : start + columns])
        return new

    def _aligned(self, x: torch.Tensor) -> torch.Tensor:
        cache = self._cache
        storage = cache.allocate()
        # Columns left of a sequence repeat its first token: finite, and masked.
        source = (torch.arange(cache.columns, device=x.device) - cache.padding.unsqueeze(1)).clamp_(min=0)
        index = source[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        storage[:, :, : cache.columns].copy_(x.gather(2, index))
        return storage


def _blocks(columns: int) -> int:
    """Columns rounded up to whole blocks."""
    return -(-columns // BLOCK_TOKENS) * BLOCK_TOKENS
