"""What a framework makes of a machine: how it moves state to host memory and weights to its engines.

Constants of a machine type are what its devices and links can do; a framework may use less of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from nereus.core import Cluster, DeviceKind


@dataclass(frozen=True, slots=True)
class Habits:
    """Rates of offloaded state to host memory and from it. `constants`: instead of those of a kind of device."""

    host_bytes_per_s: float
    fetch_bytes_per_s: float
    constants: Mapping[str, float]
    words: str

    def of(self, kind: DeviceKind) -> DeviceKind:
        """A kind of device as the framework uses it."""
        rate, back = (min(kind.host_bytes_per_s, own) for own in (self.host_bytes_per_s, self.fetch_bytes_per_s))
        fetch = {"offload.fetch": back / rate} if rate else {}
        return replace(kind, host_bytes_per_s=rate, constants={**kind.constants, **self.constants, **fetch})


HABITS: Mapping[str, Habits] = MappingProxyType(
    {
        # Optimizer state goes to new pageable memory (megatron_policy_worker.py: `v.to("cpu")`) and back: published
        # refits of Qwen3-30B-A3B and 235B-A22B (NVIDIA-NeMo/RL#3294: all but the transfer 10 and 23 s, for 23 and 44 GB
        # a device in the recipes of 16 and 64) give 2.1 GB/s there. The way back, without page faults, is assumed to
        # reach 8 GB/s; steps of large models depend much on it. Every rank gathers every tensor: 0.1 to 0.2 ms for each
        # beside its bytes (#1379: 5.5 s for 235B, 14 s for DeepSeek-V3; #3294: 3.0 and 7.3 s for 30B and 235B).
        "nemo-rl": Habits(
            2.1e9,
            8e9,
            MappingProxyType({"sync.whole": 1.0, "sync.tensor_s": 1.6e-4}),
            "offloaded state moves to pageable host memory at 2.1 GB/s and back at 8 (assumed), and a weight "
            "synchronisation gathers every tensor on every device (0.16 ms each beside its bytes)",
        )
    }
)
"""By framework; one that is not listed is taken to use a machine as well as it can be used."""


def used_by(framework: str, cluster: Cluster) -> Cluster:
    """The cluster as a framework uses it."""
    if framework not in HABITS:
        return cluster
    return replace(cluster, kinds={name: HABITS[framework].of(kind) for name, kind in cluster.kinds.items()})


def said(framework: str) -> tuple[str, ...]:
    """What is taken for its use of machines, in words."""
    return (f"{framework}: {HABITS[framework].words}",) if framework in HABITS else ()
