"""Tokenizers of Hugging Face directories."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nereus.core import SettingsError
from nereus.tasks.jsonl import Jsonl
from nereus.trainer.tokenizer import HuggingFaceTokenizer

WORDS = ["<pad>", "<end>", "<user>", "<assistant>", "two", "and", "three", "five"]
TEMPLATE = "{% for m in messages %}<user> {{ m.content }} {% endfor %}<assistant>"


def save(folder: Path, **options: str) -> Path:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", **options)
    tokenizer.save_pretrained(folder)
    return folder


def test_encodes_plain_and_chat_and_decodes_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(save(tmp_path, eos_token="<end>", chat_template=TEMPLATE))
    assert tokenizer.encode("two and three") == (4, 5, 6)
    assert tokenizer.encode("two and three", chat=True) == (2, 4, 5, 6, 3)
    assert tokenizer.decode([7, 1]) == "five"
    assert tokenizer.stop_tokens == (1,)


def test_a_directory_without_a_tokenizer_an_end_or_a_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match="empty"):
        HuggingFaceTokenizer.load(tmp_path / "empty")
    with pytest.raises(SettingsError, match="not a directory"):
        HuggingFaceTokenizer.load(tmp_path / "none")
    with pytest.raises(SettingsError, match="eos_token"):
        HuggingFaceTokenizer.load(save(tmp_path / "endless"))
    plain = HuggingFaceTokenizer.load(save(tmp_path / "plain", eos_token="<end>"))
    with pytest.raises(SettingsError, match="no chat template"):
        plain.encode("two", chat=True)


def test_a_task_and_its_tokenizer_travel_to_another_process(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "two and three", "answer": "five"}\n')
    tokenizer = HuggingFaceTokenizer.load(save(tmp_path / "model", eos_token="<end>"))
    task = pickle.loads(pickle.dumps(Jsonl(str(rows), tokenizer, held_out_share=0.0)))
    assert task.prompt(0).tokens == (4, 5, 6)
    assert task.score(task.prompt(0), [7, 1]) == 1.0
