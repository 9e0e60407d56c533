"""A unit's share of the table cut into micro-batches, by number of sequences and by padded tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from nereus.trainer.decoder.batch import MicroBatch
from nereus.trainer.table import Array

TOKENS = ("prompt_tokens", "prompt_lengths", "response_tokens", "response_lengths")


def micro_batches(
    arrays: Mapping[str, Array], sequences: int, tokens: int | None, dtype: torch.dtype, device: torch.device
) -> list[MicroBatch]:
    """At most `sequences` each and, when given, at most `tokens` padded tokens (one sequence always fits).

    The order of the rows is kept; columns other than the tokens are cut to the longest response and cast to `dtype`.
    """
    lengths = arrays["prompt_lengths"] + arrays["response_lengths"]
    return [_micro_batch(arrays, start, stop, dtype).to(device) for start, stop in _cuts(lengths, sequences, tokens)]


def _cuts(lengths: Array, sequences: int, tokens: int | None) -> Iterator[tuple[int, int]]:
    start, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, int(length))
        full = row - start >= sequences or (tokens is not None and longest * (row - start + 1) > tokens)
        if full and row > start:
            yield start, row
            start, longest = row, int(length)
    if start < len(lengths):
        yield start, len(lengths)


def _micro_batch(arrays: Mapping[str, Array], start: int, stop: int, dtype: torch.dtype) -> MicroBatch:
    prompts, responses = arrays["prompt_lengths"][start:stop], arrays["response_lengths"][start:stop]
    tokens = np.zeros((stop - start, int((prompts + responses).max())), dtype=np.int64)
    for row in range(stop - start):
        prompt, response = int(prompts[row]), int(responses[row])
        tokens[row, :prompt] = arrays["prompt_tokens"][start + row, :prompt]
        tokens[row, prompt : prompt + response] = arrays["response_tokens"][start + row, :response]
    width = int(responses.max())
    columns = {
        name: torch.from_numpy(
            np.ascontiguousarray(column[start:stop, :width] if column.ndim == 2 else column[start:stop])
        )
        for name, column in arrays.items()
        if name not in TOKENS
    }
    mask = torch.from_numpy(np.arange(width) < responses[:, None])
    return MicroBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(prompts.copy()),
        torch.from_numpy(responses.copy()),
        {name: column.to(dtype) for name, column in (columns | {"response_mask": mask}).items()},
    )
