"""The counting task: its order of prompts and its verifier."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import SettingsError, plugins
from nereus.core.ports import Prompt, Task
from nereus.tasks.counting import EOS, VOCABULARY, ZERO, Counting

THREE = Prompt(0, (1, 7, 3), {"digit": 3})


def answer(digits: str) -> list[int]:
    return [EOS if digit == "." else ZERO + int(digit) for digit in digits]


def test_prompts_are_a_function_of_seed_and_index() -> None:
    task = Counting(seed=5)
    forwards = [task.prompt(i) for i in range(50)]
    backwards = [Counting(seed=5).prompt(i) for i in reversed(range(50))][::-1]
    assert forwards == backwards
    assert [p.id for p in forwards] == list(range(50))
    assert [p.tokens for p in forwards] != [Counting(seed=6).prompt(i).tokens for i in range(50)]


def test_the_order_is_the_same_in_every_version() -> None:
    assert [Counting(seed=0).prompt(i).facts["digit"] for i in range(12)] == [1, 5, 1, 2, 8, 2, 0, 0, 0, 0, 4, 4]


def test_training_never_starts_from_a_held_out_digit_and_uses_every_other() -> None:
    task = Counting(held_out_digits=(3, 7))
    assert {task.prompt(i).facts["digit"] for i in range(400)} == {0, 1, 2, 4, 5, 6, 8, 9}
    assert {p.facts["digit"] for p in task.held_out()} == {3, 7}
    assert len(task.held_out()) >= 64


def test_a_prompt_is_begin_digit_separator() -> None:
    prompt = Counting().prompt(3)
    assert prompt.tokens == (1, ZERO + prompt.facts["digit"], 3)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (".", 0.0),
        ("3.", 1 / 48),
        ("34567890123.", 11 / 48),
        ("345", 3 / 48),
        ("3455", 0.5 * 3 / 48),
        ("3455678.", 0.5 * 3 / 48),
        ("4567.", 0.0),
        ("34.567", 2 / 48),
        ("3456789012" * 5 + ".", 1.0),
        ("3456789012" * 5 + "0", 0.5),
    ],
)
def test_the_verifier_counts_leading_correct_digits(response: str, score: float) -> None:
    assert Counting(cap=48).score(THREE, answer(response)) == pytest.approx(score)


@given(st.integers(0, 9), st.lists(st.integers(ZERO, ZERO + 9), max_size=60), st.booleans())
def test_the_verifier_agrees_with_the_longest_common_prefix(start: int, tokens: list[int], ends: bool) -> None:
    right = [ZERO + (start + i) % 10 for i in range(60)]
    matching = max(n for n in range(len(tokens) + 1) if tokens[:n] == right[:n])
    expected = min(matching, 20) / 20 * (1.0 if matching == len(tokens) else 0.25)
    task = Counting(cap=20, error_factor=0.25)
    prompt = Prompt(0, (), {"digit": start})
    assert task.score(prompt, tokens + [EOS] * ends) == pytest.approx(expected)


def test_only_digits_and_the_end_can_be_sampled() -> None:
    task: Task = Counting()
    allowed = set(range(VOCABULARY)) - set(task.masked_tokens)
    assert allowed == {EOS} | {ZERO + d for d in range(10)}
    assert set(task.stop_tokens) <= allowed


@pytest.mark.parametrize(
    "options",
    [
        {"held_out_digits": [10]},
        {"held_out_digits": list(range(10))},
        {"cap": 0},
        {"error_factor": 1.5},
        {"held_out_prompts": -1},
        {"cup": 3},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="counting"):
        plugins.make("nereus.tasks", "counting", options)


def test_options_from_yaml_are_accepted() -> None:
    task = plugins.make("nereus.tasks", "counting", {"held_out_digits": [1, 2], "seed": 3})
    assert task == Counting(seed=3, held_out_digits=(1, 2))
    assert plugins.names("nereus.tasks") == ("counting", "jsonl")
