"""Text of a script to words and operators, each with its line. Quotes stay in the words: expansion needs them."""

from __future__ import annotations

import re
from dataclasses import dataclass

OPERATORS = ("&&", "||", ";;", "<<-", "<<<", "<<", ">>", ">&", "&>", "<&", ";", "|", "&", "(", ")", "<", ">", "\n")
_BREAKS = frozenset(" \t\n;|&()<>")
_HEREDOC = re.compile(r"[\"'\\]*(\w+)")


class ShellSyntaxError(Exception):
    """The text is not a shell script. `line` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Token:
    """A word (with its quotes) or an operator. `body` is the text of a here-document that starts here."""

    text: str
    line: int
    operator: bool = False
    body: str = ""


def tokens(text: str, line: int = 1) -> list[Token]:
    """Every token of a script. Raises ShellSyntaxError for quotes and brackets that are never closed."""
    return _Lexer(text.replace("\r\n", "\n"), line).run()


def closing(text: str, start: int, line: int = 1) -> int:
    """The index after the bracket that closes the one at `start` (`(`, `{`), quotes inside respected."""
    opened, closed = text[start], {"(": ")", "{": "}"}[text[start]]
    depth, index = 0, start
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 2
            continue
        if char in "'\"`" and not (char == "'" and opened == "{"):
            index = quoted(text, index, line)
            continue
        if char == opened:
            depth += 1
        elif char == closed:
            depth -= 1
            if not depth:
                return index + 1
        index += 1
    raise ShellSyntaxError(line + text.count("\n", 0, start), f"{opened!r} opened here is never closed")


def quoted(text: str, start: int, line: int = 1) -> int:
    """The index after the quote that closes the one at `start`."""
    quote, index = text[start], start + 1
    while index < len(text):
        char = text[index]
        if char == quote:
            return index + 1
        if quote == '"' and char == "$" and text[index + 1 : index + 2] in ("(", "{"):
            index = closing(text, index + 1, line)
            continue
        index += 2 if char == "\\" and quote != "'" else 1
    raise ShellSyntaxError(line + text.count("\n", 0, start), f"the quote {quote} opened here is never closed")


class _Lexer:
    def __init__(self, text: str, line: int) -> None:
        self.text, self.base, self.line, self.at = text, line, line, 0
        self.found: list[Token] = []
        self.pending: list[int] = []

    def run(self) -> list[Token]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self._skip(2)
            elif char in " \t\r":
                self.at += 1
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif not self._operator():
                self._word()
        self.found.append(Token("\n", self.line, operator=True))
        return self.found

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _operator(self) -> bool:
        operator = next((op for op in OPERATORS if self.text.startswith(op, self.at)), None)
        if operator is None:
            return False
        if operator in ("<<", "<<-"):
            self.pending.append(len(self.found))
        self.found.append(Token(operator, self.line, operator=True))
        self._skip(len(operator))
        if operator == "\n" and self.pending:
            self._here_documents()
        return True

    def _here_documents(self) -> None:
        for index in self.pending:
            if index + 1 >= len(self.found):
                continue
            name = _HEREDOC.match(self.found[index + 1].text)
            end = name and re.compile(rf"^\s*{name.group(1)}\s*$", re.MULTILINE).search(self.text, self.at)
            if not end:
                raise ShellSyntaxError(self.found[index].line, "the here-document opened here is never closed")
            token = self.found[index]
            self.found[index] = Token(token.text, token.line, operator=True, body=self.text[self.at : end.start()])
            self._skip(end.end() - self.at)
        self.pending = []

    def _word(self) -> None:
        """One word; an array `NAME=(...)` is one word with its brackets."""
        start, line = self.at, self.line
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self._skip(2)
            elif char in "'\"`":
                self._skip(quoted(self.text, self.at, self.base) - self.at)
            elif char == "$" and self.text[self.at + 1 : self.at + 2] in ("(", "{"):
                self._skip(closing(self.text, self.at + 1, self.base) - self.at)
            elif char == "(" and re.fullmatch(r"\w+\+?=", self.text[start : self.at]):
                self._skip(_array_end(self.text, self.at, self.base) - self.at)
            elif char in _BREAKS:
                break
            else:
                self.at += 1
        text = self.text[start : self.at].replace("\\\n", "")
        if text.isdigit() and self.text[self.at : self.at + 1] in ("<", ">"):
            return  # a file descriptor
        self.found.append(Token(text, line))


def _array_end(text: str, start: int, line: int) -> int:
    """`closing` of an array, whose comments may hold anything."""
    index = start + 1
    while index < len(text):
        char = text[index]
        if char == "#" and text[index - 1] in " \t\n(":
            index = text.find("\n", index)
            if index < 0:
                break
        elif char == ")":
            return index + 1
        elif char in "'\"`":
            index = quoted(text, index, line)
        elif char == "$" and text[index + 1 : index + 2] in ("(", "{"):
            index = closing(text, index + 1, line)
        else:
            index += 2 if char == "\\" else 1
    raise ShellSyntaxError(line + text.count("\n", 0, start), "the array opened here is never closed")
