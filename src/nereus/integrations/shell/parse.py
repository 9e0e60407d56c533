"""Tokens to a tree of commands: simple ones, branches, loops, functions. Redirections are dropped."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from nereus.integrations.shell.lexer import ShellSyntaxError, Token, tokens

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_REDIRECTIONS = frozenset({"<", ">", ">>", ">&", "&>", "<&", "<<<"})
_ENDS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})


@dataclass(frozen=True, slots=True)
class Simple:
    """One command: its words as written, assignments in front included; `body` of a here-document."""

    words: tuple[str, ...]
    line: int
    body: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands joined by `&&` and `||`; `joins[i]` stands in front of `nodes[i + 1]`."""

    nodes: tuple[Node, ...]
    joins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """if / elif / else: (condition, body) pairs; a condition of no nodes is `else`."""

    arms: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Loop:
    """for (with `name` and `words`) or while (with `condition`)."""

    body: tuple[Node, ...]
    line: int
    name: str = ""
    words: tuple[str, ...] = ()
    condition: tuple[Node, ...] = ()
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """case: the word and (patterns, body) arms."""

    word: str
    arms: tuple[tuple[tuple[str, ...], tuple[Node, ...]], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """A function's definition; a group in brackets has no name and runs at once."""

    name: str
    body: tuple[Node, ...] = field(default=())


Node: TypeAlias = "Simple | Chain | Branch | Loop | Case | Function"


def parse(text: str, line: int = 1) -> tuple[Node, ...]:
    """The commands of a script. Raises ShellSyntaxError with the line."""
    parser = _Parser(tokens(text, line))
    try:
        nodes = parser.block(frozenset())
    except RecursionError:
        raise ShellSyntaxError(line, "nested too deep") from None
    if not parser.done:
        raise ShellSyntaxError(parser.here.line, f"{parser.here.text!r} stands where a command should")
    return nodes


class _Parser:
    def __init__(self, found: list[Token]) -> None:
        self.found, self.at = found, 0

    @property
    def done(self) -> bool:
        return self.at >= len(self.found)

    @property
    def here(self) -> Token:
        return self.found[min(self.at, len(self.found) - 1)]

    def take(self) -> Token:
        token = self.here
        if self.done:
            raise ShellSyntaxError(token.line, "the script ends inside a command")
        self.at += 1
        return token

    def is_operator(self, *texts: str) -> bool:
        return not self.done and self.here.operator and self.here.text in texts

    def is_word(self, *texts: str) -> bool:
        return not self.done and not self.here.operator and self.here.text in texts

    def expect(self, word: str, opened: int, what: str) -> None:
        if self.done or self.here.text != word:
            raise ShellSyntaxError(opened, f"{what} opened here has no {word!r}")
        self.at += 1

    def block(self, ends: frozenset[str]) -> tuple[Node, ...]:
        """Commands up to one of `ends`."""
        nodes: list[Node] = []
        while True:
            while self.is_operator(";", "\n", "&", "|"):
                self.at += 1
            if self.done or (self.here.text in ends and (not self.here.operator or self.here.text in (")", ";;"))):
                return tuple(nodes)
            if (self.here.text in _ENDS and not self.here.operator) or self.is_operator(")", ";;", "&&", "||"):
                return tuple(nodes)
            nodes.append(self.chain())

    def chain(self) -> Node:
        nodes, joins = [self.command()], []
        while self.is_operator("&&", "||"):
            joins.append(self.take().text)
            while self.is_operator("\n"):
                self.at += 1
            nodes.append(self.command())
        return Chain(tuple(nodes), tuple(joins)) if joins else nodes[0]

    def command(self) -> Node:
        token = self.here
        if token.operator and token.text == "(":
            return self.bracket()
        match token.text if not token.operator else "":
            case "if":
                return self.branch()
            case "for" | "select":
                return self.loop_over()
            case "while" | "until":
                return self.loop_while()
            case "case":
                return self.case()
            case "{":
                return self.group("")
            case "function":
                self.at += 1
                return self.function(self.take().text)
        if self.at + 2 < len(self.found) and [t.text for t in self.found[self.at + 1 : self.at + 3]] == ["(", ")"]:
            return self.function(self.take().text)
        return self.simple()

    def bracket(self) -> Node:
        """`( commands )`, or `(( arithmetic ))` kept as one test."""
        line = self.take().line
        if self.is_operator("("):
            words = []
            while not (self.is_operator(")") and self.found[self.at + 1].text == ")"):
                words.append(self.take().text)
            self.at += 2
            self._redirections([])
            return Simple(("((", " ".join(words)), line)
        body = self.block(frozenset({")"}))
        self.expect(")", line, "the bracket")
        self._redirections([])
        return Function("", body)

    def group(self, name: str) -> Function:
        line = self.take().line
        body = self.block(frozenset({"}"}))
        self.expect("}", line, "the group")
        self._redirections([])
        return Function(name, body)

    def function(self, name: str) -> Node:
        if self.is_operator("("):
            self.at += 2
        while self.is_operator("\n"):
            self.at += 1
        if self.is_word("{"):
            return self.group(name)
        return Function(name, (self.command(),))

    def branch(self) -> Branch:
        line = self.take().line
        arms = [self._arm(line)]
        while self.is_word("elif"):
            self.at += 1
            arms.append(self._arm(line))
        if self.is_word("else"):
            self.at += 1
            arms.append(((), self.block(frozenset({"fi"}))))
        self.expect("fi", line, "the if")
        self._redirections([])
        return Branch(tuple(arms), line)

    def _arm(self, line: int) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        condition = self.block(frozenset({"then"}))
        self.expect("then", line, "the if")
        return condition, self.block(frozenset({"elif", "else", "fi"}))

    def loop_over(self) -> Loop:
        line = self.take().line
        words: list[str] = []
        name = ""
        if self.is_operator("("):
            while not self.is_word("do"):
                self.take()
        else:
            name = self.take().text
            if self.is_word("in"):
                self.at += 1
            while not self.done and not self.here.operator:
                words.append(self.take().text)
        return Loop(self._body(line, "the for"), line, name, tuple(words))

    def loop_while(self) -> Loop:
        token = self.take()
        condition = self.block(frozenset({"do"}))
        return Loop(self._body(token.line, "the loop"), token.line, condition=condition, negated=token.text == "until")

    def _body(self, line: int, what: str) -> tuple[Node, ...]:
        while self.is_operator(";", "\n"):
            self.at += 1
        self.expect("do", line, what)
        body = self.block(frozenset({"done"}))
        self.expect("done", line, what)
        self._redirections([])
        return body

    def case(self) -> Case:
        line = self.take().line
        word = self.take().text
        arms: list[tuple[tuple[str, ...], tuple[Node, ...]]] = []
        while self.is_operator("\n"):
            self.at += 1
        self.expect("in", line, "the case")
        while True:
            while self.is_operator("\n", ";;", ";", "&"):
                self.at += 1
            if self.is_word("esac"):
                self.at += 1
                return Case(word, tuple(arms), line)
            patterns = []
            while not self.is_operator(")"):
                token = self.take()
                if not token.operator:
                    patterns.append(token.text)
            self.at += 1
            arms.append((tuple(patterns), self.block(frozenset({";;", "esac"}))))

    def simple(self) -> Simple:
        token = self.here
        words: list[str] = []
        body = self._redirections(words)
        if not words and not body and self.at < len(self.found) and self.found[self.at] is token:
            raise ShellSyntaxError(token.line, f"{token.text!r} stands where a command should")
        return Simple(tuple(words), token.line, body)

    def _redirections(self, words: list[str]) -> str:
        """Collect words and drop redirections up to the end of a command; the text of its here-document."""
        body, tests = "", 0
        while not self.done:
            token = self.here
            if not token.operator:
                tests += (token.text == "[[") - (token.text == "]]")
                words.append(token.text)
            elif token.text in ("<<", "<<-"):
                body = body or token.body
                self.at += 1
            elif token.text in _REDIRECTIONS and not tests:
                self.at += 1
            elif tests and token.text != "\n":
                words.append(token.text)
                self.at += 1
                continue
            elif not (tests and token.text == "\n"):
                break
            self.at += 1
        return body
