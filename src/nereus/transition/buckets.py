"""Bytes of the staging buffers of a transition: one for what a device sends, one for what it receives (D5.12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from nereus.core import DTYPE_BYTES, Kind, TensorSpec

LEAST_BYTES, MOST_BYTES = 1 << 14, 1 << 26
SHARE, SYNC_SHARE = 32, 8
"""A bucket is this part of the whole state, between the limits; in a synchronisation of the parameters alone.

Parameters go to many devices in more than one hop, so that smaller buckets would make their messages tiny.
"""
ALIGNMENT = 64
"""Bytes; every message in a bucket starts at a multiple, so that elements of any dtype lie aligned in it."""


def bucket_bytes(tensors: Iterable[TensorSpec], dtypes: Mapping[Kind, str], share: int = SHARE) -> int:
    """The most that one staging buffer takes: small beside the state, large enough that messages are few.

    Every device knows it from the model's size.
    """
    total = sum(tensor.elements for tensor in tensors) * sum(DTYPE_BYTES[dtype] for dtype in dtypes.values())
    return min(max(total // share, LEAST_BYTES), MOST_BYTES)


def staging_bytes(traffic: Mapping[tuple[int, int], int], bucket: int) -> Counter[int]:
    """Device → the most that its two buffers take, of (source, target) → bytes that one primitive sends."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for (source, target), size in traffic.items():
        padded = size + size // 1024 + ALIGNMENT
        sent[source] = sent.get(source, 0) + padded
        received[target] = received.get(target, 0) + padded
    most = Counter({device: min(size, bucket) for device, size in sent.items()})
    for device, size in received.items():
        most[device] += min(size, bucket)
    return most
