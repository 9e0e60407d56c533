"""What the last pp rank computes of a micro-batch, chosen by name."""

from __future__ import annotations

from collections.abc import Collection

import torch

from nereus.core import NereusError
from nereus.trainer.decoder.batch import MicroBatch
from nereus.trainer.decoder.model import Decoder

OUTPUTS = ("log_probs", "entropy", "values", "scores")


def compute(decoder: Decoder, x: torch.Tensor, batch: MicroBatch, wanted: Collection[str]) -> dict[str, torch.Tensor]:
    """Outputs from the last layer's hidden states [b, L, hidden]; zero where a response is padded.

    `log_probs`, `entropy` and `values` [b, R] stand at the position that predicts each response token; `scores` [b]
    at the last response token.
    """
    unknown = set(wanted) - set(OUTPUTS)
    if unknown:
        raise NereusError(f"outputs {sorted(unknown)} are unknown, valid: {', '.join(OUTPUTS)}")
    found: dict[str, torch.Tensor] = {}
    if set(wanted) & {"log_probs", "entropy", "values"}:
        found |= _by_token(decoder, x, batch, wanted)
    if "scores" in wanted:
        rows = torch.arange(len(batch.tokens), device=x.device)
        found["scores"] = decoder.scalars(decoder.normed(x[rows, batch.last_positions()]))
    return found


def _by_token(decoder: Decoder, x: torch.Tensor, batch: MicroBatch, wanted: Collection[str]) -> dict[str, torch.Tensor]:
    rows, steps, positions = batch.response_index()
    normed = decoder.normed(x[rows, positions - 1])
    flat: dict[str, torch.Tensor] = {}
    if "log_probs" in wanted or "entropy" in wanted:
        targets = batch.tokens[rows, positions]
        flat["log_probs"], entropy = decoder.log_probs(normed, targets, "entropy" in wanted)
        if entropy is not None:
            flat["entropy"] = entropy
    if "values" in wanted:
        flat["values"] = decoder.scalars(normed)
    shape = (len(batch.tokens), batch.response_width)
    return {
        name: values.new_zeros(shape).index_put((rows, steps), values)
        for name, values in flat.items()
        if name in wanted
    }
