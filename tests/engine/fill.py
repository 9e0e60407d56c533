"""Small schemas, and the shards that the oracle cuts for them."""

from __future__ import annotations

import torch

from nereus.core import EMU, Cut, Kind, StateSchema, TensorSpec, Where
from nereus.engine.positions import TORCH_DTYPES
from tests.oracles.cut import cut


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


def local(schema: StateSchema, unit: EMU, device: int) -> dict[tuple[str, Kind], torch.Tensor]:
    """What the oracle says `device` must hold in `unit`, bit patterns of bf16 as such."""
    found: dict[tuple[str, Kind], torch.Tensor] = {}
    for (name, kind), values in cut(schema, unit, device).items():
        dtype = TORCH_DTYPES[schema.dtypes[kind]]
        signed = values.view("i2") if values.dtype == "u2" else values
        found[name, kind] = torch.from_numpy(signed).view(dtype)
    return found
