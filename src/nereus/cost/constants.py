"""Constants of devices and links that the cost model reads, with what holds where nothing was measured.

`clusters/_constants.py` says what each means; a cluster file may give any of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from nereus.core import DeviceKind, Link

KIND: Mapping[str, float] = MappingProxyType(
    {
        # Kernels at the device's peaks, which the efficiencies of classes then discount.
        "gemm.start_s": 0.0,
        "gemm.share": 1.0,
        "gemm.half_k": 0.0,
        "gemm.half_mn": 0.0,
        "gemm.stream": 1.0,
        "gemm.power": 2.0,
        "gemm.low_share": 1.0,
        "gemm.experts_share": 1.0,
        "attention.start_s": 0.0,
        "attention.share": 1.0,
        "attention.half_tokens": 0.0,
        # In tiles: five products backward instead of two, and no scores written.
        "attention.backward": 2.5,
        "attention.scores": 0.0,
        "attention.multiple": 1.0,
        "attention.unfused": 0.0,
        "decode_attention.start_s": 0.0,
        "decode_attention.share": 1.0,
        "decode_attention.tokens": 0.0,
        "stream.share": 1.0,
        "stream.activation": 1.0,
        # A host that waits for collectives; a backward pass launches twice the kernels of its forward pass.
        "launch.power": 2.0,
        "launch.ahead": 0.0,
        "launch.collective": 0.0,
        "launch.backward": 2.0,
        "dispatch_s": 5e-4,
        # What the built-in job does.
        "dp.bucket_bytes": 25.0 * 2**20,
        "dp.overlap": 0.8,
        "optimizer.kernels": 54.0,
        "pp.scatter": 0.0,
        "offload.fetch": 1.0,
        # Copies and hashes of state are not counted.
        "state.copy_bytes_per_s": math.inf,
        "state.hash_bytes_per_s": math.inf,
        "sync.whole": 0.0,
        "sync.tensor_s": 0.0,
        # An engine that launches every kernel and works in waves; no `kv_bytes`: those of the model.
        "generation.launches": 1.0,
        "generation.reduce": 1.0,
        "generation.reduce_ranks": 8.0,
        "generation.step_s": 0.0,
        "generation.sequence_s": 0.0,
        "generation.refill": 0.0,
        "generation.latent_s": 0.0,
        "generation.experts_start_s": 0.0,
        "generation.expert_s": 0.0,
        "generation.experts_share": 1.0,
        "generation.kv_bytes": 0.0,
        "prefill.tokens": math.inf,
        # Memory beside tensors; a norm of plain operations keeps its input and its normalised state in fp32.
        "memory.norm_copies": 2.0,
        "communicator.bytes": 0.0,
        "context.bytes": 0.0,
        "workspace.bytes": 0.0,
        "graphs.bytes": 0.0,
    }
)
"""Of a kind of device."""

LINK: Mapping[str, float] = MappingProxyType(
    {
        "collective.start_s": 0.0,
        "collective.fill_s": 0.0,
        "collective.fill_bytes": 1.0,
        "collective.few_ranks": 0.0,
        "all_reduce.share": 1.0,
        "gather.share": 1.0,
        "state.bytes_per_s": 0.0,
        "state.all_bytes_per_s": math.inf,
        "send.share": 1.0,
    }
)
"""Of a link: hops and bytes alone."""


def of_kind(kind: DeviceKind, name: str) -> float:
    """A constant of a kind of device."""
    return kind.constants.get(name, KIND[name])


def of_link(link: Link, name: str) -> float:
    """A constant of a link."""
    return link.constants.get(name, LINK[name])


def state_bytes_per_s(link: Link) -> float:
    """Rate at which a device moves state to another: from memory to memory where it can, unlike collectives."""
    return of_link(link, "state.bytes_per_s") or link.bytes_per_s * of_link(link, "send.share")
