"""Counting on from a digit, modulo 10. Longer correct answers score higher, so responses grow while it is learned.

A prompt is BOS, a digit, SEP; the answer counts on from that digit (3 4 5 ... 9 0 1 ...) and ends with EOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus.core import SettingsError
from nereus.core.ports import Prompt
from nereus.tasks._order import key

PAD, BOS, EOS, SEP, ZERO = 0, 1, 2, 3, 4
DIGITS = 10
VOCABULARY = 16
MASKED = (PAD, BOS, SEP, *range(ZERO + DIGITS, VOCABULARY))


@dataclass(frozen=True, slots=True)
class Counting:
    """`cap` correct digits score 1; a wrong digit after the correct ones multiplies the score by `error_factor`.

    Prompts that start from `held_out_digits` are kept for evaluation, `held_out_prompts` of them in all.
    """

    seed: int = 0
    held_out_digits: tuple[int, ...] = (3, 7)
    cap: int = 48
    error_factor: float = 0.5
    held_out_prompts: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "held_out_digits", tuple(self.held_out_digits))
        if not set(self.held_out_digits) <= set(range(DIGITS)) or not self.training_digits:
            raise SettingsError(
                f"counting: held_out_digits is {list(self.held_out_digits)}, must be some, not all, of the digits 0-9"
            )
        if self.cap < 1:
            raise SettingsError(f"counting: cap is {self.cap} digits, must be at least 1")
        if not 0 <= self.error_factor <= 1:
            raise SettingsError(f"counting: error_factor is {self.error_factor}, must be between 0 and 1")
        if self.held_out_prompts < 0:
            raise SettingsError(f"counting: held_out_prompts is {self.held_out_prompts}, must be at least 0")

    @property
    def training_digits(self) -> tuple[int, ...]:
        """The digits that training prompts start from."""
        return tuple(digit for digit in range(DIGITS) if digit not in self.held_out_digits)

    def prompt(self, index: int) -> Prompt:
        """A training digit drawn by (seed, index)."""
        digits = self.training_digits
        return _prompt(index, digits[key(self.seed, index) % len(digits)])

    def held_out(self) -> Sequence[Prompt]:
        """The held-out digits in turn."""
        digits = self.held_out_digits
        return tuple(_prompt(i, digits[i % len(digits)]) for i in range(self.held_out_prompts if digits else 0))

    def score(self, prompt: Prompt, response: Sequence[int]) -> float:
        """The share of `cap` that the leading correct digits reach; less when a wrong token follows."""
        start, correct = int(prompt.facts["digit"]), 0
        for token in response:
            if token == EOS:
                break
            if token != ZERO + (start + correct) % DIGITS:
                return self.error_factor * min(correct, self.cap) / self.cap
            correct += 1
        return min(correct, self.cap) / self.cap

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """EOS ends an answer."""
        return (EOS,)

    @property
    def masked_tokens(self) -> tuple[int, ...]:
        """Everything but digits and EOS."""
        return MASKED


def _prompt(index: int, digit: int) -> Prompt:
    return Prompt(index, (BOS, ZERO + digit, SEP), {"digit": digit})
