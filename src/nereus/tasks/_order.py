"""A seeded order that never changes with a library's version: keys are hashes of what is ordered."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b


def key(*parts: object) -> int:
    """64 bits that depend on every part, the same on every machine."""
    text = "/".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=4)
def permutation(count: int, *parts: object) -> tuple[int, ...]:
    """0..count-1 in an order that depends on `parts`."""
    return tuple(sorted(range(count), key=lambda index: (key(*parts, index), index)))
