"""The sample table of one RL step: numpy columns at the coordinator, in global sample order (D5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(slots=True)
class SampleTable:
    """What one step knows about its samples, and how far the step has come.

    `done` are finished calls, `updates` the mini-batches applied by each update call: with both, a step that was
    interrupted goes on where it stopped and no sample is used twice.
    """

    step: int
    sample_ids: NDArray[np.int64]
    columns: dict[str, Array] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    updates: dict[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.sample_ids)

    def set_tokens(self, name: str, sequences: Sequence[Sequence[int]]) -> None:
        """Store ragged token sequences as `{name}_tokens` (right padded with 0) and `{name}_lengths`."""
        tokens, lengths = padded(sequences)
        self.columns[f"{name}_tokens"] = tokens
        self.columns[f"{name}_lengths"] = lengths

    def tokens(self, name: str, rows: Array) -> list[list[int]]:
        """The ragged sequences of some rows."""
        return ragged(self.columns[f"{name}_tokens"][rows], self.columns[f"{name}_lengths"][rows])

    def mask(self) -> NDArray[np.float64]:
        """1 where a response token stands, shape (samples, longest response)."""
        width = self.columns["response_tokens"].shape[1]
        return (np.arange(width) < self.columns["response_lengths"][:, None]).astype(np.float64)

    def rows(self, rows: Array, names: Sequence[str]) -> dict[str, Array]:
        """The named columns of some rows, those that exist."""
        return {name: np.ascontiguousarray(self.columns[name][rows]) for name in names if name in self.columns}


def padded(sequences: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Right padded int64 tokens (sequences, longest) and lengths."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    tokens = np.zeros((len(sequences), max(1, int(lengths.max(initial=0)))), dtype=np.int64)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens, lengths


def ragged(tokens: Array, lengths: Array) -> list[list[int]]:
    """What `padded` was given."""
    return [row[:length].tolist() for row, length in zip(tokens, lengths.tolist(), strict=True)]


def shares(count: int, parts: int) -> list[NDArray[np.int64]]:
    """Row numbers of each part: ceil/floor shares in order, larger first (D5.8)."""
    return [np.asarray(part, dtype=np.int64) for part in np.array_split(np.arange(count), parts)]


def mini_batches(seed: int, step: int, samples: int, size: int, epochs: int) -> list[NDArray[np.int64]]:
    """Row numbers of every mini-batch of a step: a permutation an epoch that depends on (seed, step, epoch) alone."""
    batches: list[NDArray[np.int64]] = []
    for epoch in range(epochs):
        order = np.random.Generator(np.random.Philox(key=[seed, (step << 16) + epoch])).permutation(samples)
        batches += [np.asarray(order[start : start + size], dtype=np.int64) for start in range(0, samples, size)]
    return batches


def align(parts: Sequence[Array], rows: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """One column from the parts that units sent back, each for its rows; narrower parts are padded with 0."""
    column = np.zeros(shape, dtype=np.float64)
    for part, index in zip(parts, rows, strict=True):
        if part.ndim == 1:
            column[index] = part
        else:
            column[index, : part.shape[1]] = part
    return column
