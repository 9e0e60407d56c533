"""Random-number generators of single ranks: state that is not part of any tensor, and moves by the key of its stream.

A stream is named by what it depends on: the data-parallel rank; inside a tensor-parallel group also the tp rank and the
tp degree where ranks must differ. Ranks whose keys are equal share a stream and must be in the same state. A key that
nobody has gets a new stream, a function of (seed, key) alone; so after a change of the tp degree, which is part of
those keys, all of them are new, and saved streams are never mixed with new ones.
"""

from __future__ import annotations

import hashlib

import torch

from nereus.engine.library.describe import Shard

PREFIX = "stream/"


def stream_name(*key: object) -> str:
    """The name under which a stream travels."""
    return PREFIX + "/".join(map(str, key))


def stream_seed(seed: int, name: str, position: int = 0) -> int:
    """Seed of a new stream: different for every name and data position, the same on every run."""
    digest = hashlib.sha256(f"{seed}|{name}|{position}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def stream_shard(generator: torch.Generator) -> Shard:
    """The state of a generator as bytes, to be described under `stream_name`."""
    return Shard(generator.get_state(), fresh=True)
