"""What is moved: the tensors of a Llama-like decoder in fp32 with two Adam moments, every element known by its index.

Needs torch alone, so that other tools' environments can import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

KINDS = ("param", "exp_avg", "exp_avg_sq")
ITEM_BYTES = 4
MODULUS = 16_777_213
"""Below 2^24: every value is exact in fp32."""
SMALL_ELEMENTS = 1 << 19

State = dict[tuple[str, str], torch.Tensor]
"""(tensor, kind) → the part of it that one device holds."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter: its global shape, the dim that TP cuts (None: replicated), its layer (-1: first, None: last)."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    layer: int | None

    @property
    def row_elements(self) -> int:
        """Elements of one index of the cut dim, or all of them."""
        return prod(self.shape) if self.dim is None else prod(self.shape) // self.shape[self.dim]

    def interval(self, tp: int, rank: int) -> tuple[int, int]:
        """Indices [start, stop) of the cut dim on a TP rank; of a replicated tensor the one row that it is."""
        if self.dim is None:
            return 0, 1
        share = self.shape[self.dim] // tp
        return rank * share, (rank + 1) * share

    def pp_rank(self, layers: int, pp: int) -> int:
        """Where it lives when the layers are cut evenly."""
        if self.layer is None:
            return pp - 1
        return max(self.layer, 0) * pp // layers


@dataclass(frozen=True, slots=True)
class Size:
    """A decoder with untied embeddings."""

    hidden: int = 1024
    ffn: int = 2816
    layers: int = 4
    heads: int = 16
    kv_heads: int = 4
    vocab: int = 4096

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its parameters, in order of the layers."""
        head = self.hidden // self.heads
        found = [Tensor("embed", (self.vocab, self.hidden), 0, -1)]
        for layer in range(self.layers):
            shapes = {
                "q": ((self.heads * head, self.hidden), 0),
                "k": ((self.kv_heads * head, self.hidden), 0),
                "v": ((self.kv_heads * head, self.hidden), 0),
                "o": ((self.hidden, self.heads * head), 1),
                "gate": ((self.ffn, self.hidden), 0),
                "up": ((self.ffn, self.hidden), 0),
                "down": ((self.hidden, self.ffn), 1),
                "norm1": ((self.hidden,), None),
                "norm2": ((self.hidden,), None),
            }
            found += [Tensor(f"layers.{layer}.{name}", *what, layer) for name, what in shapes.items()]
        return (
            *found,
            Tensor("norm", (self.hidden,), None, None),
            Tensor("head", (self.vocab, self.hidden), 0, None),
        )

    @property
    def bytes(self) -> int:
        """Of the whole state, once."""
        return sum(prod(tensor.shape) for tensor in self.tensors) * ITEM_BYTES * len(KINDS)


SIZES: Mapping[str, Size] = {
    "full": Size(),  # 642 MB
    "half": Size(hidden=704, ffn=1936, heads=16, kv_heads=8, vocab=4096),  # 330 MB
    "quarter": Size(hidden=512, ffn=1408, heads=8, kv_heads=8, vocab=4096),  # 209 MB
    "sixth": Size(hidden=384, ffn=1056, heads=8, kv_heads=8, vocab=2048),  # 106 MB
    "tiny": Size(hidden=64, ffn=128, layers=2, heads=4, kv_heads=2, vocab=128),
    "large": Size(layers=8),  # 1.18 GB
}


def values(tensor: Tensor, kind: str, start: int, stop: int) -> torch.Tensor:
    """Indices [start, stop) of the cut dim: element i of the whole tensor is (i + a number of its name) mod MODULUS.

    Not to be written to: those of small tensors, which many trials ask for again, are computed once.
    """
    small = prod(tensor.shape) <= SMALL_ELEMENTS
    return (_small if small else _computed)(tensor, kind, start, stop)


def _computed(tensor: Tensor, kind: str, start: int, stop: int) -> torch.Tensor:
    seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(tensor.name + kind)) % 9973 * 131
    if tensor.dim == 1:
        rows, columns = tensor.shape
        index = torch.arange(rows)[:, None] * columns + torch.arange(start, stop)[None, :]
    else:
        index = torch.arange(start * tensor.row_elements, stop * tensor.row_elements)
    shape = list(tensor.shape)
    if tensor.dim is not None:
        shape[tensor.dim] = stop - start
    return (index + seed).remainder_(MODULUS).to(torch.float32).reshape(shape)


@dataclass(frozen=True, slots=True)
class Units:
    """Replicas of one layout. `devices[i][pp_rank * tp + tp_rank]` holds that position of replica i."""

    tp: int
    pp: int
    devices: tuple[tuple[int, ...], ...]

    def at(self, device: int) -> tuple[int, int] | None:
        """(pp rank, tp rank) of a device; None where it holds nothing."""
        for unit in self.devices:
            if device in unit:
                return divmod(unit.index(device), self.tp)
        return None

    def held(self, size: Size, device: int) -> Iterator[tuple[Tensor, int, int]]:
        """(tensor, start, stop) of everything a device holds."""
        at = self.at(device)
        for tensor in size.tensors if at is not None else ():
            if at is not None and tensor.pp_rank(size.layers, self.pp) == at[0]:
                yield tensor, *tensor.interval(self.tp, at[1])

    def stored_bytes(self, size: Size, device: int) -> int:
        """Bytes that a device holds."""
        rows = sum((stop - start) * tensor.row_elements for tensor, start, stop in self.held(size, device))
        return rows * ITEM_BYTES * len(KINDS)


@lru_cache(maxsize=1024)
def _small(tensor: Tensor, kind: str, start: int, stop: int) -> torch.Tensor:
    return _computed(tensor, kind, start, stop)


def filled(size: Size, units: Units, device: int) -> State:
    """What a device holds, in tensors of its own."""
    return {
        (tensor.name, kind): _computed(tensor, kind, start, stop)
        for tensor, start, stop in units.held(size, device)
        for kind in KINDS
    }


def wrong(state: State, size: Size, units: Units, device: int) -> list[str]:
    """Names of tensors that are missing, too many, or differ in any bit."""
    held = {tensor.name: (tensor, start, stop) for tensor, start, stop in units.held(size, device)}
    names = {(name, kind) for name in held for kind in KINDS}
    found = [f"{name} {kind}" for name, kind in names ^ state.keys()]
    for name, kind in names & state.keys():
        if not torch.equal(state[name, kind], values(held[name][0], kind, *held[name][1:])):
            found.append(f"{name} {kind}")
    return sorted(found)
