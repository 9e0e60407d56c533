"""Constants of the cost model that a cluster file may give, by name, and what each means.

A kind or link without them is priced at its peaks, which conservative efficiencies discount until a job has measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KIND_CONSTANTS: Mapping[str, str] = MappingProxyType(
    {
        "gemm.start_s": "seconds of the smallest matrix product",
        "gemm.share": "share of the peak that a large matrix product reaches",
        "gemm.half_k": "length of the inner sum at which a product reaches half of that",
        "gemm.half_mn": "elements of the output at which a product reaches half of that",
        "gemm.stream": "share of the memory bandwidth at which a product moves its matrices",
        "gemm.power": "sharpness of the maximum of a product's arithmetic and traffic",
        "gemm.low_share": "share of that which products in fp8 or fp4 reach, casts included",
        "gemm.experts_share": "share of a product's rate that the grouped products of experts reach",
        "attention.start_s": "seconds of the smallest attention over whole sequences",
        "attention.share": "share of the peak that attention over long sequences reaches",
        "attention.half_tokens": "tokens of a sequence at which attention reaches half of that",
        "attention.backward": "backward pass of attention over its forward pass",
        "attention.scores": "how often attention writes or reads the scores of all pairs of tokens; 0 in tiles",
        "attention.multiple": "what sequences times heads must be a multiple of for a fused softmax",
        "attention.unfused": "kernels of a softmax that is not fused beyond those of one that is",
        "decode_attention.start_s": "seconds of the smallest attention of new tokens to cached ones",
        "decode_attention.share": "share of the memory bandwidth at which a cached sequence is read",
        "decode_attention.tokens": "cached tokens that take as long as what a sequence costs by itself",
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
        "memory.norm_copies": "fp32 copies of its input that a norm keeps for its backward; 0.5: fused, in bf16",
        "communicator.bytes": "device memory of one communicator",
        "context.bytes": "device memory of the runtime before the first tensor",
        "workspace.bytes": "device memory that matrix products use beside their operands",
        "graphs.bytes": "device memory of the graphs of a generation engine",
        "prefill.tokens": "most prompt tokens that a generation engine works on at once",
        "generation.launches": "share of the kernels of a decode step that the host launches one by one",
        "generation.reduce": "seconds of an engine's own all-reduce in a decode step over those of the library",
        "generation.reduce_ranks": "most ranks of one host that such an all-reduce joins",
        "generation.step_s": "seconds of a generation engine between two decode steps",
        "generation.sequence_s": "the same for each sequence",
        "generation.refill": "above 0: a generation engine gives a free place to the next sequence, prompts unpadded",
        "generation.latent_s": "seconds of a decode step's small kernels around latent attention, of each layer",
        "generation.experts_start_s": "seconds of a generation engine's smallest group of experts",
        "generation.expert_s": "seconds that every expert of such a group adds beside its weights and arithmetic",
        "generation.experts_share": "share of a product's rate that such a group reaches with many tokens",
        "generation.kv_bytes": "bytes of one element of the KV cache, where not those of the model",
        "offload.fetch": "rate from host memory over the rate to it",
        "state.copy_bytes_per_s": "rate at which devices copy state of their own into fresh memory, all at once",
        "state.hash_bytes_per_s": "rate at which devices hash copies of state before they are merged, all at once",
        "sync.whole": "above 0: a weight synchronisation brings the whole model to every device, not its shard alone",
        "sync.tensor_s": "seconds of the host for each tensor of a weight synchronisation",
        "uncertainty": "standard deviation of the logarithm of a class's efficiency, where constants were not fitted",
    }
)

LINK_CONSTANTS: Mapping[str, str] = MappingProxyType(
    {
        "collective.start_s": "seconds of a collective beside its hops and bytes",
        "collective.fill_s": "seconds that a large message takes beyond its bytes",
        "collective.fill_bytes": "sent bytes at which half of those seconds are taken",
        "collective.few_ranks": "loss of rate with few ranks, divided by their number",
        "all_reduce.share": "share of the rate that a large all-reduce among many ranks reaches",
        "gather.share": "the same for all-gather, reduce-scatter and all-to-all",
        "group.setup_s": "seconds to make a group of all devices that were measured",
        "state.bytes_per_s": "rate at which a device moves state to another; left out: that of a p2p message",
        "state.all_bytes_per_s": "the same of all devices of a node together",
        "send.share": "the same for a point-to-point message",
    }
)
