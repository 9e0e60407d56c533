"""Gradients of a position: accumulated wide, completed across the unit, and their norm counted once per element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from nereus.core import TensorSpec, Where
from nereus.trainer.decoder.model import Decoder

Gradients = dict[str, torch.Tensor]


@contextmanager
def accumulating(decoder: Decoder) -> Iterator[Gradients]:
    """Parameters record gradients inside; the dict holds their sums, in max(fp32, dtype), once the block ends."""
    sums: Gradients = {}
    hooks = []
    for name, parameter in decoder.params.items():
        total = sums[name] = torch.zeros_like(parameter, dtype=decoder.wide, requires_grad=False)
        decoder.hooks.track("gradients", total)
        parameter.requires_grad_(True)
        if decoder.dtype == decoder.wide:
            parameter.grad = total  # autograd adds to it in place
        else:
            hooks.append(parameter.register_post_accumulate_grad_hook(_adder(total)))
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in decoder.params.values():
            parameter.grad = None
            parameter.requires_grad_(False)


def complete(decoder: Decoder, gradients: Gradients) -> None:
    """Add what other positions of the unit contributed to the same elements, in place.

    Replicated KV heads and norms inside heads collect partial sums on every tp rank (one flat buffer for all); tied
    embeddings collect one part at each end of the pipeline.
    """
    if decoder.tp.size > 1:
        _sum_replicas(decoder, gradients)
    if decoder.pp.size > 1 and (decoder.first or decoder.last):
        peer = decoder.pp.size - 1 - decoder.pp.rank
        for name, tensor in decoder.tensors.items():
            if tensor.where is Where.BOTH_ENDS:
                gradients[name].add_(decoder.pp.swap(gradients[name].contiguous(), peer))


def square_norm(decoder: Decoder, gradients: Mapping[str, torch.Tensor]) -> float:
    """This position's share of the squared global norm, in fp64: the unit's shares sum to each element once."""
    total = torch.zeros((), dtype=torch.float64, device=decoder.device)
    for name, gradient in gradients.items():
        if _counts(decoder, decoder.tensors[name]):
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
    return float(total)


def _adder(total: torch.Tensor) -> object:
    def add(parameter: torch.Tensor) -> None:
        total.add_(parameter.grad)
        parameter.grad = None

    return add


def _counts(decoder: Decoder, tensor: TensorSpec) -> bool:
    """Whether this position is the first that holds its part of a tensor."""
    if tensor.where is Where.BOTH_ENDS and not decoder.first:
        return False
    if decoder.tp.rank == 0:
        return True
    own, before = (tensor.interval(decoder.tp.size, rank) for rank in (decoder.tp.rank, decoder.tp.rank - 1))
    return own != before


def _sum_replicas(decoder: Decoder, gradients: Gradients) -> None:
    """Each rank adds its part to a buffer of whole tensors, the buffer is summed, each takes its part back."""
    tp, rank = decoder.tp.size, decoder.tp.rank
    partial = [
        tensor
        for tensor in decoder.tensors.values()
        if tensor.partial_gradient or (tensor.cut.replicated and tensor.cut.blocks < tp)
    ]
    if not partial:
        return
    flat = torch.zeros(sum(tensor.elements for tensor in partial), dtype=decoder.wide, device=decoder.device)
    own, offset = [], 0
    for tensor in partial:
        start, stop = tensor.interval(tp, rank)
        whole = flat[offset : offset + tensor.elements].view(tensor.shape)
        own.append((tensor.name, whole.narrow(tensor.cut.dim or 0, start, stop - start)))
        offset += tensor.elements
    for name, part in own:
        part.copy_(gradients[name])
    decoder.tp.all_reduce(flat)
    for name, part in own:
        gradients[name].copy_(part)
