"""Prompts from a JSON Lines file, one object a line, scored by a reward function of the user's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus.core import SettingsError, plugins
from nereus.core.ports import Prompt, Tokenizer
from nereus.tasks._order import permutation

Row = Mapping[str, Any]
Reward = Callable[[Row, str], float]


def contains_answer(prompt: Row, response: str) -> float:
    """1 when the row's `answer` occurs in the response, else 0: a reward for short questions."""
    return float(str(prompt["answer"]) in response)


@dataclass(frozen=True, slots=True)
class Jsonl:
    """`reward` is the dotted name of a function (row, response text) -> float; `prompt_key` names the row's prompt.

    `held_out_share` of the rows are kept for evaluation. With `chat_template` a prompt is one user message in the
    tokenizer's chat template. Every epoch is a new seeded order of all training rows.
    """

    path: str
    tokenizer: Tokenizer
    reward: str = "nereus.tasks.jsonl.contains_answer"
    prompt_key: str = "prompt"
    held_out_share: float = 0.05
    chat_template: bool = False
    seed: int = 0
    _training: tuple[Row, ...] = field(init=False, repr=False, compare=False)
    _held_out: tuple[Row, ...] = field(init=False, repr=False, compare=False)
    _reward: Reward = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_share < 1:
            raise SettingsError(f"jsonl: held_out_share is {self.held_out_share}, must be at least 0 and below 1")
        rows = _read(Path(self.path), self.prompt_key)
        kept = math.ceil(self.held_out_share * len(rows))
        if kept >= len(rows):
            raise SettingsError(f"jsonl: {self.path} has {len(rows)} rows, {kept} held out leave none to train on")
        order = permutation(len(rows), self.seed, "held out")
        object.__setattr__(self, "_held_out", tuple(rows[i] for i in sorted(order[:kept])))
        object.__setattr__(self, "_training", tuple(rows[i] for i in sorted(order[kept:])))
        object.__setattr__(self, "_reward", plugins.dotted(self.reward))
        if not callable(self._reward):
            raise SettingsError(f"jsonl: reward {self.reward!r} is not a function")

    def prompt(self, index: int) -> Prompt:
        """Row number `index` of an endless sequence of epochs, each in its own order."""
        epoch, place = divmod(index, len(self._training))
        return self._prompt(index, self._training[permutation(len(self._training), self.seed, "epoch", epoch)[place]])

    def held_out(self) -> Sequence[Prompt]:
        """The rows kept for evaluation, in file order."""
        return tuple(self._prompt(index, row) for index, row in enumerate(self._held_out))

    def score(self, prompt: Prompt, response: Sequence[int]) -> float:
        """What the reward function gives. Raises SettingsError when that is not a finite number."""
        reward = self._reward(prompt.facts, self.tokenizer.decode(response))
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise SettingsError(f"jsonl: reward {self.reward!r} returned {reward!r}, must be a finite number")
        return float(reward)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokenizer's."""
        return self.tokenizer.stop_tokens

    @property
    def masked_tokens(self) -> tuple[int, ...]:
        """None: every token of the vocabulary may be sampled."""
        return ()

    def _prompt(self, index: int, row: Row) -> Prompt:
        return Prompt(index, self.tokenizer.encode(row[self.prompt_key], self.chat_template), row)


def _read(path: Path, prompt_key: str) -> tuple[Row, ...]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise SettingsError(f"jsonl: cannot read {path}: {error.strerror}") from None
    rows = tuple(_row(path, number, line, prompt_key) for number, line in enumerate(lines, 1) if line.strip())
    if not rows:
        raise SettingsError(f"jsonl: {path} has no rows")
    return rows


def _row(path: Path, number: int, line: str, prompt_key: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise SettingsError(f"jsonl: {path} line {number} is not JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise SettingsError(f"jsonl: {path} line {number} is not an object")
    if prompt_key not in row:
        raise SettingsError(f"jsonl: {path} line {number} has no {prompt_key!r}, it has: {', '.join(sorted(row))}")
    if not isinstance(row[prompt_key], str) or not row[prompt_key]:
        raise SettingsError(f"jsonl: {path} line {number}: {prompt_key!r} must be a text that is not empty")
    return row
