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
        "launch.norm": "sharpness of the maximum of device and host time",
        "communicator.bytes": "device memory of one set of communicators",
        "context.bytes": "device memory of the runtime before the first tensor, workspaces included",
        "uncertainty": "standard deviation of the logarithm of a class's efficiency, where constants were not fitted",
    }
)

LINK_CONSTANTS: Mapping[str, str] = MappingProxyType({})
