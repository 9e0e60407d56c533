"""How many sequences a step handles and how long they are: what drifts (paper §3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from nereus.core.errors import SettingsError

MOST_SEQUENCES = 1 << 32
"""More than any step handles: what is counted of them stays an integer of 64 bits."""
MOST_TOKENS = 1 << 40
"""More than any sequence has: what they take stays a finite number of bytes."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens. `quantiles`, when given, are evenly spaced from 0 to 1."""

    mean: float
    p95: float
    maximum: float
    quantiles: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.mean <= self.maximum or not 0 <= self.p95 <= self.maximum:
            raise SettingsError(f"lengths: need 0 <= mean, p95 <= maximum, got {self}")

    @classmethod
    def constant(cls, tokens: float) -> Lengths:
        """Every sequence has the same length."""
        return cls(tokens, tokens, tokens)

    @classmethod
    def measured(cls, lengths: Sequence[int], levels: int = 21) -> Lengths:
        """The distribution of observed lengths (at least one)."""
        ordered = sorted(lengths)
        last = len(ordered) - 1

        def at(level: float) -> float:
            return float(ordered[round(level * last)])

        quantiles = tuple(at(index / (levels - 1)) for index in range(levels))
        return cls(sum(ordered) / len(ordered), at(0.95), float(ordered[-1]), quantiles)


LOSSES = ("eager", "vocab_parallel", "in_place", "in_place_chunked", "fused")
"""Softmax by separate operations; one fp32 buffer that becomes the gradient; the gradient in place of the logits, with
an entropy of all tokens or of some at a time; logits of a few tokens at a time only."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One RL step: prompts × samples_per_prompt sequences in mini-batches of `mini_batch` sequences."""

    prompts: int
    samples_per_prompt: int
    prompt: Lengths
    response: Lengths
    mini_batch: int
    max_response_tokens: int
    epochs: int = 1
    packed: bool = False
    """Whether a micro-batch holds its sequences end to end; else they are padded to the longest of them."""
    loss: str = "eager"
    """How log-probabilities are made of logits, and so what copies of logits there are: one of `LOSSES`."""

    def __post_init__(self) -> None:
        for field in ("prompts", "samples_per_prompt", "mini_batch", "max_response_tokens", "epochs"):
            if getattr(self, field) < 1:
                raise SettingsError(f"workload: {field} is {getattr(self, field)}, must be at least 1")
        if self.sequences * self.epochs > MOST_SEQUENCES:
            raise SettingsError(
                f"workload: {self.prompts:,} prompts x {self.samples_per_prompt:,} x {self.epochs:,} epochs, "
                f"a step handles at most {MOST_SEQUENCES:,} sequences"
            )
        for name, lengths in (("prompt", self.prompt), ("response", self.response)):
            if lengths.maximum == inf:
                raise SettingsError(f"workload: the maximum of {name} lengths must be finite")
            if lengths.maximum > MOST_TOKENS:
                raise SettingsError(
                    f"workload: the maximum of {name} lengths is {lengths.maximum:g}, a sequence has at most "
                    f"{MOST_TOKENS:,} tokens"
                )
        if self.loss not in LOSSES:
            raise SettingsError(f"workload: loss {self.loss!r}, valid: {', '.join(LOSSES)}")
        if self.sequences % self.mini_batch:
            raise SettingsError(
                f"mini_batch {self.mini_batch} does not divide the batch of {self.sequences} sequences "
                f"({self.prompts} prompts x {self.samples_per_prompt})"
            )

    @property
    def sequences(self) -> int:
        """Sequences of one RL step."""
        return self.prompts * self.samples_per_prompt

    @property
    def updates(self) -> int:
        """Optimizer updates of one RL step."""
        return self.epochs * self.sequences // self.mini_batch
