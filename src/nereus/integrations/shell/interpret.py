"""Walk a script's commands without running them: assignments, branches whose condition is known, functions, sources.

A script is read as if started with the variables that are given and nothing else set. Where a condition cannot be
known (it asks about files or another program's output) every arm is read, and what they disagree on stays open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from nereus.integrations.shell.expand import SYMBOL, Variables, arithmetic, fields, here, string
from nereus.integrations.shell.lexer import ShellSyntaxError, tokens
from nereus.integrations.shell.parse import ASSIGNMENT, Branch, Case, Chain, Function, Loop, Node, Simple, parse

DEEPEST = 20
MOST_CHARACTERS = 1 << 16
"""Of a variable: one that is appended to itself again and again has no end."""
_SILENT = frozenset({"export", "local", "declare", "readonly", "typeset"})


@dataclass(frozen=True, slots=True)
class Command:
    """One command as it would run: expanded words and the line it stands on."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Script:
    """The commands a script would run, variables that its conditions left open, and files it sources in vain."""

    commands: tuple[Command, ...]
    undecided: Mapping[str, int]
    """Variable to the line of the condition that decides it."""
    missing: tuple[str, ...]
    assigned: Mapping[str, int] = field(default_factory=dict)
    """Variable to the line that sets it last."""


def interpret(text: str, given: Mapping[str, str], source: Callable[[str], str | None]) -> Script:
    """The commands of a script. `source` gives the text of a sourced file, None where there is none.

    Raises ShellSyntaxError with the line.
    """
    walker = _Walker(dict(given), source)
    walker.run(parse(text))
    return Script(tuple(walker.commands), walker.undecided, tuple(walker.missing), walker.assigned)


class _Walker:
    def __init__(self, variables: Variables, source: Callable[[str], str | None]) -> None:
        self.variables, self.source = variables, source
        self.fixed = frozenset(variables)
        self.commands: list[Command] = []
        self.undecided: dict[str, int] = {}
        self.assigned: dict[str, int] = {}
        self.missing: list[str] = []
        self.functions: dict[str, tuple[Node, ...]] = {}
        self.depth = 0

    def run(self, nodes: Sequence[Node]) -> None:
        if self.depth > DEEPEST:
            return
        self.depth += 1
        for node in nodes:
            self.visit(node)
        self.depth -= 1

    def visit(self, node: Node) -> bool | None:
        """Read one command; what its exit status says where that is known."""
        match node:
            case Simple():
                return self.simple(node)
            case Chain(nodes=nodes, joins=joins):
                return self.chain(nodes, joins)
            case Branch(arms=arms, line=line):
                self.branch([(self.condition(test), body) for test, body in arms], line)
            case Loop():
                self.loop(node)
            case Case(word=word, arms=arms, line=line):
                self.case(word, arms, line)
            case Function(name="", body=body):
                self.run(body)
            case Function(name=name, body=body):
                self.functions[name] = body
        return True

    def chain(self, nodes: Sequence[Node], joins: Sequence[str]) -> bool | None:
        status = self.visit(nodes[0])
        for join, node in zip(joins, nodes[1:], strict=True):
            if status is None:
                self.branch([(None, (node,))], getattr(node, "line", 0))
            elif status == (join == "&&"):
                status = self.visit(node)
        return status

    def condition(self, nodes: Sequence[Node]) -> Callable[[], bool | None]:
        """Decided only when its turn comes: conditions may assign."""

        def decide() -> bool | None:
            status: bool | None = True
            for node in nodes:
                status = self.visit(node)
            return status

        return decide

    def branch(self, arms: Sequence[tuple[Callable[[], bool | None] | None, Sequence[Node]]], line: int) -> None:
        """The first arm whose condition holds; all of them from the first that cannot be known."""
        for index, (decide, body) in enumerate(arms):
            status = decide() if decide else None
            if status:
                return self.run(body)
            if status is None:
                return self.either([body for _, body in arms[index:]], line)
        return None

    def either(self, bodies: Sequence[Sequence[Node]], line: int) -> None:
        """Read every body from the same start; a variable that they leave different stays open."""
        before = dict(self.variables)
        ends: list[Variables] = [before]
        for body in bodies:
            self.variables = dict(before)
            self.run(body)
            ends.append(self.variables)
        for name in {name for end in ends for name in end}:
            values = [end.get(name) for end in ends]
            if all(value == values[0] for value in values):
                continue
            self.undecided.setdefault(name, line)
            before.pop(name, None)
        self.variables = before

    def loop(self, node: Loop) -> None:
        """A body once: with the first word of a for, or where a while's condition holds."""
        if node.condition:
            status = self.condition(node.condition)()
            if status is None:
                self.either([node.body], node.line)
            elif status is not node.negated:
                self.run(node.body)
            return
        words = [part for word in node.words for part in fields(word, self.variables)]
        if node.name and not words:
            return
        if node.name:
            self.assign(node.name, words[0], node.line)
        self.run(node.body)

    def case(self, word: str, arms: Sequence[tuple[Sequence[str], Sequence[Node]]], line: int) -> None:
        value = string(word, self.variables)
        if SYMBOL.search(value):
            given = SYMBOL.fullmatch(value)
            if given and given.group(1) and given.group(1) not in self.undecided:
                value = ""
            else:
                return self.either([body for _, body in arms], line)
        for patterns, body in arms:
            if any(fnmatchcase(value, string(pattern, self.variables)) for pattern in patterns):
                return self.run(body)
        return None

    def simple(self, node: Simple) -> bool | None:
        words = list(node.words)
        while words and words[0] in ("!", "time", "exec", "command", "nohup"):
            words.pop(0)
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            self.assignment(match, node.line)
            words.pop(0)
        if not words:
            return True
        if words[0] in ("[", "[[", "test", "(("):
            status = self.test(words)
            return status if status is None else status != (node.words[0] == "!")
        if words[0] in _SILENT:
            for word in words[1:]:
                if match := ASSIGNMENT.fullmatch(word):
                    self.assignment(match, node.line)
            return True
        return self.command(words, node)

    def command(self, words: Sequence[str], node: Simple) -> bool | None:
        expanded = [part for word in words for part in fields(word, self.variables)]
        if not expanded:
            return True
        name = expanded[0]
        if name == "read" and node.body:
            self.assign(expanded[-1], here(node.body, self.variables).strip(), node.line)
        elif name == "unset":
            for variable in expanded[1:]:
                self.variables.pop(variable, None)
        elif name in ("source", ".") and len(expanded) > 1:
            self.sourced(expanded[1])
        elif name in self.functions:
            self.call(name, expanded[1:])
        elif name == "eval":
            self.run(parse(" ".join(expanded[1:]), node.line))
        else:
            self.commands.append(Command(tuple(expanded), node.line))
            self.inner(expanded, node)
        return True if name in ("true", ":", "echo", "cd", "mkdir", "set") else {"false": False}.get(name)

    def inner(self, expanded: Sequence[str], node: Simple) -> None:
        """A script in the arguments of a shell, wherever in the line it is called (`srun ... bash -c '...'`)."""
        for index, word in enumerate(expanded[:-2]):
            if re.search(r"(^|/)(ba|z|)sh$", word) and re.fullmatch(r"-\w*c", expanded[index + 1]):
                self.run(parse(expanded[index + 2], node.line))
                return
        if node.body and re.search(r"(^|/)(ba|)sh$", expanded[0]):
            self.run(parse(here(node.body, self.variables), node.line + 1))

    def call(self, name: str, arguments: Sequence[str]) -> None:
        kept = {str(i): self.variables.pop(str(i)) for i in range(1, 10) if str(i) in self.variables}
        self.variables |= {str(i): argument for i, argument in enumerate(arguments[:9], start=1)}
        self.run(self.functions[name])
        for i in range(1, 10):
            self.variables.pop(str(i), None)
        self.variables |= kept

    def sourced(self, path: str) -> None:
        text = self.source(path)
        if text is None:
            self.missing.append(path)
        else:
            self.run(parse(text))

    def assignment(self, match: re.Match[str], line: int) -> None:
        name, index, plus, value = match.groups()
        if value.startswith("(") and value.endswith(")"):
            inner = parse_array(value[1:-1])
            items = [part for word in inner for part in fields(word, self.variables)]
            before = self.variables.get(name, []) if plus else []
            self.assign(name, (before if isinstance(before, list) else [before]) + items, line)
        elif index is None:
            before = self.variables.get(name, "") if plus else ""
            text = string(value, self.variables)
            if isinstance(before, list):
                self.assign(name, [*before, text], line)
            else:
                self.assign(name, before + text, line)

    def assign(self, name: str, value: str | list[str], line: int) -> None:
        if sum(map(len, value)) > MOST_CHARACTERS:
            raise ShellSyntaxError(line, f"{name} becomes longer than {MOST_CHARACTERS:,} characters")
        if name not in self.fixed:
            self.variables[name] = value
        self.undecided.pop(name, None)
        self.assigned[name] = line

    def test(self, words: Sequence[str]) -> bool | None:
        if words[0] == "((":
            value = arithmetic(" ".join(words[1:]), self.variables)
            return None if value is None else bool(value)
        inner = list(words[1:])
        if inner and inner[-1] in ("]", "]]"):
            inner.pop()
        return _Test(inner, self.variables, self.undecided).decide()


def parse_array(text: str) -> list[str]:
    """The words between the brackets of an array."""
    return [token.text for token in tokens(text) if not token.operator]


class _Test:
    """`[ ... ]`: and / or / not over comparisons; None for what depends on files or unknown output."""

    def __init__(self, words: Sequence[str], variables: Variables, undecided: Mapping[str, int]) -> None:
        self.words, self.variables, self.undecided = list(words), variables, undecided

    def decide(self) -> bool | None:
        for joint, stop in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            if joint in self.words:
                at = self.words.index(joint)
                parts = [
                    _Test(part, self.variables, self.undecided) for part in (self.words[:at], self.words[at + 1 :])
                ]
                values = [part.decide() for part in parts]
                return stop if stop in values else None if None in values else not stop
        words = [word for word in self.words if word not in ("(", ")")]
        if words and words[0] == "!":
            inner = _Test(words[1:], self.variables, self.undecided).decide()
            return None if inner is None else not inner
        return self.compare(words)

    def compare(self, words: Sequence[str]) -> bool | None:
        if len(words) == 1:
            value = self.value(words[0])
            return None if value is None else bool(value)
        if len(words) == 2:
            value = self.value(words[1])
            known = {"-z": not value, "-n": bool(value)} if value is not None else {}
            return known.get(words[0])
        if len(words) != 3:
            return None
        left, how, right = self.value(words[0]), words[1], self.value(words[2])
        if left is None or right is None:
            return None
        if how in ("=", "==", "!="):
            return fnmatchcase(left, right) == (how != "!=")
        if how == "=~":
            try:
                return bool(re.search(right, left))
            except re.error:
                return None
        return _numbers(left, how, right)

    def value(self, word: str) -> str | None:
        """The text of a word; a variable that nothing sets is empty; None when it is unknown."""
        text = string(word, self.variables)
        for match in SYMBOL.finditer(text):
            if match.group(1) is None or match.group(1) in self.undecided:
                return None
        return SYMBOL.sub("", text)


def _numbers(left: str, how: str, right: str) -> bool | None:
    orders = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">=", "<": "<", ">": ">"}
    if how not in orders:
        return None
    value = arithmetic(f"({left or 0}) {orders[how]} ({right or 0})", {})
    return None if value is None else bool(value)
