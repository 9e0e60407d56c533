"""Tokenizers of Hugging Face directories, behind the `Tokenizer` port; transformers is loaded on first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus.core import SettingsError


@dataclass(frozen=True, slots=True)
class HuggingFaceTokenizer:
    """The tokenizer saved in a model directory."""

    directory: Path
    tokenizer: Any

    @classmethod
    def load(cls, directory: str | Path) -> HuggingFaceTokenizer:
        """Read a directory. Raises SettingsError when it holds no tokenizer, or one without an end token."""
        from transformers import AutoTokenizer

        path = Path(directory)
        if not path.is_dir():
            raise SettingsError(f"tokenizer: {path} is not a directory")
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise SettingsError(f"tokenizer: cannot load {path}: {error}") from None
        if tokenizer.eos_token_id is None:
            raise SettingsError(f"tokenizer: {path} names no eos_token, so no response would ever end")
        return cls(path, tokenizer)

    def encode(self, text: str, chat: bool = False) -> tuple[int, ...]:
        """Token ids of a text, or of one user message in the chat template."""
        if not chat:
            return tuple(self.tokenizer(text)["input_ids"])
        if self.tokenizer.chat_template is None:
            raise SettingsError(f"tokenizer: {self.directory} has no chat template; set chat_template: false")
        message = [{"role": "user", "content": text}]
        chosen = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return tuple(self.tokenizer(chosen, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The end-of-sequence token."""
        return (int(self.tokenizer.eos_token_id),)
