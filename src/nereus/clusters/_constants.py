"""Constants of the cost model that a cluster file may give, by name, and what each means.

A kind or link without them is priced at its peaks, which conservative efficiencies discount until a job has measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KIND_CONSTANTS: Mapping[str, str] = MappingProxyType(
    {
        "gemm.share": "share of the peak that a large matrix product reaches",
        "gemm.half_flops": "operations that a product takes on top of its own, as if it were so much larger",
        "attention.share": "share of the peak that attention over long sequences reaches",
        "decode_attention.share": "share of the memory bandwidth at which a cached sequence is read",
        "stream.share": "share of the memory bandwidth that element-wise kernels reach",
        "launch.power": "sharpness of the maximum of device and host time",
        "launch.ahead": "share of a collective that runs while the host launches on",
        "launch.collective": "kernels that launching one collective counts as",
        "launch.backward": "launches of a backward pass over those of its forward pass",
        "stream.activation": "element-wise traffic of a layer over what fused kernels need",
        "dispatch_s": "seconds from a command to the workers of a call until all have answered",
        "dp.bucket_bytes": "size of the flat buffers in which gradients are reduced",
        "dp.overlap": "share of a backward pass behind which a sharded reduction hides",
        "optimizer.kernels": "operations of one Adam update of one layer",
        "pp.scatter": "links of a stage boundary that share one hidden state, as a power of tp",
        "memory.norm_copies": "copies of its input that a norm keeps for its backward",
        "communicator.bytes": "device memory of one set of communicators",
        "context.bytes": "device memory of the runtime before the first tensor, workspaces included",
        "uncertainty": "standard deviation of the logarithm of a class's efficiency, where constants were not fitted",
    }
)

LINK_CONSTANTS: Mapping[str, str] = MappingProxyType({})
