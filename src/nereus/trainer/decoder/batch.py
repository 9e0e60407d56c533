"""A micro-batch of prompt + response sequences and where its outputs are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences padded on the right with 0.

    `tokens` [b, L] is the prompt followed by the response; `columns` are aligned with the response ([b, R]) or one
    value a sequence ([b]).
    """

    tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    response_lengths: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def response_width(self) -> int:
        """R: width of response-aligned columns and outputs."""
        widths = [column.shape[1] for column in self.columns.values() if column.dim() == 2]
        return widths[0] if widths else int(self.response_lengths.max())

    def response_index(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(row, response position, sequence position) of every response token."""
        width = torch.arange(self.response_width, device=self.tokens.device)
        rows, steps = torch.nonzero(width < self.response_lengths.unsqueeze(1), as_tuple=True)
        return rows, steps, self.prompt_lengths[rows] + steps

    def last_positions(self) -> torch.Tensor:
        """Sequence position of each last response token."""
        return self.prompt_lengths + self.response_lengths - 1

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on a device."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            prompt_lengths=self.prompt_lengths.to(device),
            response_lengths=self.response_lengths.to(device),
            columns={name: column.to(device) for name, column in self.columns.items()},
        )
