"""Logical tensors filled with a function of (name, kind, index), and schemas to cut them by."""

from __future__ import annotations

import zlib

import torch

from nereus.core import EMU, Cut, Kind, StateSchema, TensorSpec, Where

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def schema(layers: int = 3, tied: bool = True, trained: bool = True) -> StateSchema:
    """A small decoder: 4 heads, 2 KV heads, a vocabulary of 10 that 4 does not divide, tied or untied embeddings."""
    vocab = Cut(0, 10, padded=True)
    ends = Where.BOTH_ENDS if tied else Where.FIRST
    tensors = [TensorSpec("embed", (10, 8), ends, cut=vocab)]
    for layer in range(layers):
        tensors += [
            TensorSpec(f"{layer}.q", (16, 8), Where.LAYER, layer, Cut(0, 4)),
            TensorSpec(f"{layer}.k", (8, 8), Where.LAYER, layer, Cut(0, 2, replicated=True)),
            TensorSpec(f"{layer}.o", (8, 16), Where.LAYER, layer, Cut(1, 4)),
            TensorSpec(f"{layer}.norm", (8,), Where.LAYER, layer),
        ]
    tensors.append(TensorSpec("norm", (8,), Where.LAST))
    if not tied:
        tensors.append(TensorSpec("head", (10, 8), Where.LAST, cut=vocab))
    dtypes = {Kind.PARAM: "fp32"}
    if trained:
        dtypes = {Kind.PARAM: "bf16", Kind.MASTER: "fp32", Kind.EXP_AVG: "fp32", Kind.EXP_AVG_SQ: "fp32"}
    return StateSchema(layers, tuple(tensors), dtypes)


def logical(spec: TensorSpec, kind: Kind, dtype: str) -> torch.Tensor:
    """The whole tensor: no two elements of a tensor and kind that tests confuse are alike."""
    start = zlib.crc32(f"{spec.name}/{kind}".encode()) % 9973
    return (torch.arange(spec.elements, dtype=torch.float64) * 0.37 + start).reshape(spec.shape).to(DTYPES[dtype])


def local(schema: StateSchema, unit: EMU, device: int) -> dict[tuple[str, Kind], torch.Tensor]:
    """What `device` must hold in `unit`, cut here block by block and padded with zeros."""
    pp_rank, rank = divmod(unit.devices.index(device), unit.layout.tp)
    tp, pp = unit.layout.tp, unit.layout.pp
    counts = [schema.layers // pp + (index < schema.layers % pp) for index in range(pp)]
    first = sum(counts[:pp_rank])
    found: dict[tuple[str, Kind], torch.Tensor] = {}
    for spec in schema.tensors:
        places = {
            Where.FIRST: pp_rank == 0,
            Where.LAST: pp_rank == pp - 1,
            Where.BOTH_ENDS: pp_rank in (0, pp - 1),
            Where.LAYER: spec.layer is not None and first <= spec.layer < first + counts[pp_rank],
        }
        for kind, dtype in schema.dtypes.items():
            if places[spec.where]:
                found[spec.name, kind] = _cut(spec.cut, logical(spec, kind, dtype), tp, rank)
    return found


def _cut(cut: Cut, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    if cut.dim is None:
        return whole
    blocks = list(whole.chunk(cut.blocks, cut.dim))
    if cut.padded:
        size = -(-len(blocks) // tp)
        blocks += [torch.zeros_like(blocks[0])] * (size * tp - len(blocks))
        mine = blocks[rank * size : (rank + 1) * size]
    elif cut.replicated and len(blocks) < tp:
        mine = [blocks[rank * len(blocks) // tp]]
    else:
        sizes = [len(blocks) // tp + (index < len(blocks) % tp) for index in range(tp)]
        mine = blocks[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    return torch.cat(mine, cut.dim)
