"""What a device stores, by category, and the limit on it (D5.10).

Counts unique storages. State, gradients, KV cache, logits and buckets are registered by whoever holds them; activations
are seen by saved-tensor hooks. On CUDA the totals come from the allocator.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nereus.core import OutOfMemoryError

CATEGORIES = ("state", "gradients", "kv_cache", "activations", "logits", "buckets")


class Hold:
    """Tensors that the ledger counts until `release` or the end of the `with` block. Keeps them alive."""

    def __init__(self, ledger: Ledger, tensors: tuple[torch.Tensor, ...]) -> None:
        self._ledger = ledger
        self.tensors = tensors

    def release(self) -> None:
        """Stop counting and keeping the tensors. A second call does nothing."""
        for tensor in self.tensors:
            self._ledger.forget(tensor)
        self.tensors = ()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Saved:
    """A tensor that autograd keeps for the backward pass; forgotten when the graph lets go of it."""

    __slots__ = ("ledger", "tensor")

    def __init__(self, ledger: Ledger, tensor: torch.Tensor) -> None:
        self.ledger = ledger
        self.tensor = tensor

    def __del__(self) -> None:
        self.ledger.forget(self.tensor)


class Ledger:
    """The storages of one device. `capacity_bytes` None: no limit."""

    counts = True
    """Whether `used_bytes` is what was registered; otherwise it has seen a tensor before it is registered."""

    def __init__(self, device: int, capacity_bytes: int | None = None) -> None:
        self.device = device
        self.capacity_bytes = capacity_bytes
        self._counts: dict[int, int] = {}
        self._entries: dict[int, tuple[str, int]] = {}
        self._now: Counter[str] = Counter()
        self._used_bytes = 0
        self._peak_bytes = 0
        self._at_peak: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes stored now."""
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes stored since the last `reset_peak`."""
        return self._peak_bytes

    def by_category(self) -> dict[str, int]:
        """Bytes at the peak by category; their sum is `peak_bytes`."""
        return {category: self._at_peak.get(category, 0) for category in CATEGORIES}

    def reset_peak(self) -> None:
        """Start a new peak at what is stored now."""
        self._peak_bytes = self.used_bytes
        self._at_peak = dict(self._now)

    def check(self, category: str, wanted_bytes: int) -> None:
        """Raise OutOfMemoryError if `wanted_bytes` more would exceed the capacity. Ask before allocating."""
        if self.capacity_bytes is not None and self.used_bytes + wanted_bytes > self.capacity_bytes:
            raise OutOfMemoryError(self.device, wanted_bytes, self.used_bytes, self.capacity_bytes, category)

    def hold(self, category: str, *tensors: torch.Tensor) -> Hold:
        """Count tensors. Raises OutOfMemoryError, and counts none of them, when they exceed the capacity."""
        if category not in CATEGORIES:
            raise ValueError(f"ledger: category {category!r}, valid: {', '.join(CATEGORIES)}")
        counted: list[torch.Tensor] = []
        try:
            for tensor in tensors:
                self._count(category, tensor)
                counted.append(tensor)
        except OutOfMemoryError:
            for tensor in counted:
                self.forget(tensor)
            raise
        return Hold(self, tensors)

    def watch(self, category: str, tensor: torch.Tensor) -> None:
        """Count a tensor for as long as somebody else keeps it. Raises OutOfMemoryError as `hold` does."""
        self._count(category, tensor)
        weakref.finalize(tensor, self._forget, tensor.untyped_storage().data_ptr()).atexit = False

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Count what autograd saves inside the context, until the backward pass frees it."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def forget(self, tensor: torch.Tensor) -> None:
        """Count one use of the tensor's storage less."""
        self._forget(tensor.untyped_storage().data_ptr())

    def _forget(self, key: int) -> None:
        count = self._counts.get(key, 0) - 1
        if count > 0:
            self._counts[key] = count
        elif count == 0:
            del self._counts[key]
            category, size = self._entries.pop(key)
            self._now[category] -= size
            self._used_bytes -= size

    def _count(self, category: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if size == 0:
            return
        if key in self._counts:
            self._counts[key] += 1
            return
        self.check(category, size if self.counts else 0)
        self._counts[key] = 1
        self._entries[key] = (category, size)
        self._now[category] += size
        self._used_bytes += size
        if self._used_bytes > self._peak_bytes:
            self._peak_bytes = self._used_bytes
            self._at_peak = dict(self._now)

    def _pack(self, tensor: torch.Tensor) -> Any:
        self._count("activations", tensor)
        # The tensor itself may be an output of the node that keeps this: a cycle that only a backward pass ends.
        return _Saved(self, tensor.detach())

    @staticmethod
    def _unpack(saved: Any) -> torch.Tensor:
        tensor: torch.Tensor = saved.tensor
        return tensor


class CudaLedger(Ledger):
    """Totals of the CUDA allocator; what nobody registered counts as activations."""

    counts = False

    def __init__(self, device: int, capacity_bytes: int | None, index: int) -> None:
        super().__init__(device, capacity_bytes)
        self._index = index

    @property
    def used_bytes(self) -> int:
        """Bytes that the allocator has handed out."""
        return int(torch.cuda.memory_allocated(self._index))

    @property
    def peak_bytes(self) -> int:
        """Most bytes handed out since the last `reset_peak`."""
        return int(torch.cuda.max_memory_allocated(self._index))

    def by_category(self) -> dict[str, int]:
        """Registered bytes at their own peak; the rest of the allocator's peak is activations."""
        found = super().by_category()
        found["activations"] += max(0, self.peak_bytes - sum(found.values()))
        return found

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        super().reset_peak()
        torch.cuda.reset_peak_memory_stats(self._index)

    @contextmanager
    def activations(self) -> Iterator[None]:
        """The allocator sees activations by itself."""
        yield
