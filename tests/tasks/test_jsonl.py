"""Prompts from a file: every row once an epoch, none of the held-out ones, rewards by dotted name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import SettingsError
from nereus.core.ports import Task
from nereus.tasks.jsonl import Jsonl, contains_answer

HERE = "tests.tasks.test_jsonl"


class Letters:
    """One token a character; a chat is put into brackets; 0 ends a response."""

    stop_tokens = (0,)

    def encode(self, text: str, chat: bool = False) -> tuple[int, ...]:
        return tuple(map(ord, f"[{text}]" if chat else text))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token != 0)


def length_over_number(prompt: Mapping[str, Any], response: str) -> float:
    return float(len(response) / prompt["n"])


def not_a_number(prompt: Mapping[str, Any], response: str) -> float:
    return float("nan")


def write(folder: Path, rows: int = 23, **options: Any) -> Jsonl:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": f"row {n}", "n": n + 1}) + "\n\n" for n in range(rows)))
    return Jsonl(str(path), Letters(), **({"prompt_key": "q", "reward": f"{HERE}.length_over_number"} | options))


@pytest.fixture(scope="module")
def rows_of_23(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jsonl")


@given(seed=st.integers(0, 2**40), share=st.floats(0, 0.9), epoch=st.integers(0, 50))
def test_every_epoch_has_each_training_row_once(rows_of_23: Path, seed: int, share: float, epoch: int) -> None:
    task = write(rows_of_23, seed=seed, held_out_share=share)
    held_out = {p.facts["n"] for p in task.held_out()}
    count = 23 - len(held_out)
    seen = [task.prompt(index) for index in range(epoch * count, (epoch + 1) * count)]
    assert sorted(p.facts["n"] for p in seen) == sorted(set(range(1, 24)) - held_out)
    assert [p.id for p in seen] == list(range(epoch * count, (epoch + 1) * count))
    assert len(held_out) >= 23 * share - 1e-9


def test_epochs_and_seeds_have_their_own_order(tmp_path: Path) -> None:
    task = write(tmp_path, held_out_share=0.0)
    first, second = ([task.prompt(e * 23 + i).facts["n"] for i in range(23)] for e in range(2))
    other = write(tmp_path, held_out_share=0.0, seed=1)
    assert first != second
    assert first != [other.prompt(i).facts["n"] for i in range(23)]
    assert first != sorted(first)


def test_text_goes_through_the_tokenizer_and_its_chat_template(tmp_path: Path) -> None:
    plain, chat = write(tmp_path), write(tmp_path, chat_template=True)
    text = plain.prompt(4).facts["q"]
    assert plain.prompt(4).tokens == tuple(map(ord, text))
    assert chat.prompt(4).tokens == tuple(map(ord, f"[{text}]"))


def test_the_reward_function_sees_the_row_and_the_text(tmp_path: Path) -> None:
    task: Task = write(tmp_path)
    prompt = task.prompt(0)
    assert task.stop_tokens == (0,)
    assert task.score(prompt, [ord("a"), ord("b"), 0]) == 2 / prompt.facts["n"]


def test_a_reward_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    task = write(tmp_path, reward=f"{HERE}.not_a_number")
    with pytest.raises(SettingsError, match=r"not_a_number.*nan"):
        task.score(task.prompt(0), [65])


def test_contains_answer_looks_for_the_answer() -> None:
    assert contains_answer({"answer": 12}, "it is 12.") == 1.0
    assert contains_answer({"answer": "Paris"}, "London") == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows"),
        ('{"q": "x"}\n{"q": \n', "line 2 is not JSON"),
        ('{"q": "x"}\n[1]\n', "line 2 is not an object"),
        ('{"q": "x"}\n{"p": "x", "a": 1}\n', "line 2 has no 'q', it has: a, p"),
        ('{"q": 5}\n', "line 1: 'q' must be a text"),
        ('{"q": "x"}\n', "1 rows, 1 held out leave none"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        Jsonl(str(path), Letters(), prompt_key="q")


def test_a_missing_file_a_bad_share_and_an_unknown_reward_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        Jsonl(str(tmp_path / "none.jsonl"), Letters())
    with pytest.raises(SettingsError, match=r"held_out_share is 1\.0"):
        write(tmp_path, held_out_share=1.0)
    with pytest.raises(SettingsError, match="no_such_function"):
        write(tmp_path, reward=f"{HERE}.no_such_function")


def test_a_separator_inside_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n{"prompt": "c"}\n', encoding="utf-8")
    task = Jsonl(str(path), Letters(), held_out_share=0.0)
    assert {task.prompt(i).facts["prompt"] for i in range(2)} == {"a\u2028b", "c"}
