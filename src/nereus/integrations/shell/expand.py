"""Variables, defaults and arithmetic in words. What is unknown stays as `${NAME}`, so that it can be named later."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import translate
from typing import TypeAlias

from nereus.integrations.shell.lexer import ShellSyntaxError, closing, quoted

Variables: TypeAlias = dict[str, "str | list[str]"]

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#?])(\[[^\]]*\])?(.*)", re.DOTALL)
SYMBOL = re.compile(r"\$\{([A-Za-z_]\w*|[0-9]+)(\[@\])?\}|\$\(.*?\)|`.*?`", re.DOTALL)
"""What expansion leaves where it knows no value."""

_BINARY: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: a**b if abs(b) < 64 else 0,
    ast.LShift: lambda a, b: a << b if b < 64 else 0,
}
_COMPARE: Mapping[type[ast.AST], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def fields(word: str, variables: Variables) -> list[str]:
    """The words that one word becomes: unquoted values are split at white space, arrays become their elements."""
    found: list[str] = [""]
    started = False
    for text, is_quoted in _pieces(word, variables):
        if isinstance(text, list):
            items = text if is_quoted else [word for item in text for word in item.split()]
        elif is_quoted:
            items, started = [text], True
        else:
            items = _split(text) if text else []
        if items:
            found[-1] += items[0]
            found.extend(items[1:])
    return [item for item in found if item] or ([""] if started else [])


def _split(text: str) -> list[str]:
    """At white space, but for what an unknown command prints: that stays one word."""
    found, index = [""], 0
    while index < len(text):
        if match := re.compile(r"\s+").match(text, index):
            found.append("")
            index = match.end()
            continue
        end = index + 1
        if text.startswith("$(", index):
            with suppress(ShellSyntaxError):  # else it is a part of what was one word before
                end = closing(text, end)
        found[-1] += text[index:end]
        index = end
    return found


def string(word: str, variables: Variables) -> str:
    """The value of a word where it is not split, as on the right of an assignment."""
    return "".join(" ".join(text) if isinstance(text, list) else text for text, _ in _pieces(word, variables))


def arithmetic(text: str, variables: Variables) -> int | None:
    """The value of `$(( text ))`; None when a name in it is unknown or it is no arithmetic."""
    expanded = string(text.replace('"', ""), variables).strip()
    try:
        node = ast.parse(expanded.replace("&&", " and ").replace("||", " or "), mode="eval").body
        return _evaluate(node, variables, 0)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.AST, variables: Variables, depth: int) -> int:
    if depth > 50:
        raise ValueError("too deep")
    match node:
        case ast.Constant(value=int() as value):
            return int(value)
        case ast.Name(id=name):
            held = variables.get(name)
            if not isinstance(held, str):
                raise ValueError(name)
            inner = ast.parse(held.strip() or "0", mode="eval").body
            return _evaluate(inner, variables, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _evaluate(left, variables, depth + 1), _evaluate(right, variables, depth + 1)
            return _BINARY[type(op)](a, b)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return int(
                _COMPARE[type(op)](_evaluate(left, variables, depth + 1), _evaluate(right, variables, depth + 1))
            )
        case ast.BoolOp(op=op, values=values):
            truths = [bool(_evaluate(value, variables, depth + 1)) for value in values]
            return int(all(truths) if isinstance(op, ast.And) else any(truths))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, variables, depth + 1)
    raise ValueError("not arithmetic")


def _pieces(word: str, variables: Variables) -> list[tuple[str | list[str], bool]]:
    """(text, whether quoted) by part of a word; a list is an array's elements."""
    found: list[tuple[str | list[str], bool]] = []
    index = 0
    while index < len(word):
        char = word[index]
        if char == "\\":
            found.append((word[index + 1 : index + 2], True))
            index += 2
        elif char == "'":
            end = quoted(word, index)
            found.append((word[index + 1 : end - 1], True))
            index = end
        elif char == '"':
            end = quoted(word, index)
            found.extend(_inside_quotes(word[index + 1 : end - 1], variables))
            index = end
        elif char in "$`":
            value, index = _dollar(word, index, variables)
            found.append((value, False))
        else:
            end = next((i for i in range(index, len(word)) if word[i] in "\\'\"$`"), len(word))
            found.append((word[index:end], False))
            index = end
    return found


def _inside_quotes(text: str, variables: Variables) -> list[tuple[str | list[str], bool]]:
    found: list[tuple[str | list[str], bool]] = [("", True)]
    index = 0
    while index < len(text):
        char = text[index]
        if char == "\\" and text[index + 1 : index + 2] in tuple('"\\$`\n'):
            found.append((text[index + 1].replace("\n", ""), True))
            index += 2
        elif char in "$`":
            value, index = _dollar(text, index, variables)
            found.append((value, True))
        else:
            found.append((char, True))
            index += 1
    return found


def _dollar(text: str, index: int, variables: Variables) -> tuple[str | list[str], int]:
    """The value of what starts with `$` or a backtick at `index`, and where it ends."""
    if text[index] == "`":
        end = quoted(text, index)
        return text[index:end], end
    follows = text[index + 1 : index + 2]
    if follows == "(":
        end = closing(text, index + 1)
        return _substitution(text[index:end], variables), end
    if follows == "{":
        end = closing(text, index + 1)
        return parameter(text[index + 2 : end - 1], variables), end
    name = _NAME.match(text, index + 1)
    if not name:
        return "$", index + 1
    return parameter(name.group(), variables), name.end()


def _substitution(text: str, variables: Variables) -> str:
    """`$(( ))` as a number; `$(echo ...)` and `$(cat <<E ...)` as text; any other command as it stands."""
    if text.startswith("$((") and text.endswith("))"):
        value = arithmetic(text[3:-2], variables)
        if value is None:
            names = [name for name in re.findall(r"[A-Za-z_]\w*", text) if name not in variables]
            return "".join(f"${{{name}}}" for name in names) or text
        return str(value)
    inner = text[2:-1].strip()
    echo = re.fullmatch(r"echo\s+([^|;&<>]*)", inner)
    if echo:
        return string(echo.group(1), variables).strip()
    document = re.fullmatch(r"cat\s*<<-?\s*(['\"]?)(\w+)\1\n(.*)\n\s*\2\s*", inner, re.DOTALL)
    if document:
        return document.group(3) if document.group(1) else here(document.group(3), variables)
    return text


def here(body: str, variables: Variables) -> str:
    """The text of a here-document."""
    return "".join(" ".join(text) if isinstance(text, list) else text for text, _ in _inside_quotes(body, variables))


def parameter(inside: str, variables: Variables) -> str | list[str]:
    """The value of `${inside}`."""
    parts = _PARAMETER.fullmatch(inside)
    if not parts:
        return f"${{{inside}}}"
    length, name, index, rest = parts.groups()
    if name in "@*":
        return [variables[str(i)] for i in range(1, 10) if isinstance(variables.get(str(i)), str)]  # type: ignore[misc]
    if name == "#":
        return str(sum(str(i) in variables for i in range(1, 10)))
    value = _indexed(variables.get(name), index)
    if length:
        return str(len(value)) if value is not None else "0"
    unknown = f"${{{name}{'[@]' if index in ('[@]', '[*]') else ''}}}"
    return _modified(value, unknown, rest, variables)


def _indexed(value: str | list[str] | None, index: str | None) -> str | list[str] | None:
    if value is None or index in ("[@]", "[*]"):
        return [value] if isinstance(value, str) else value
    items = value if isinstance(value, list) else [value]
    position = (index or "[0]")[1:-1]
    if not position.lstrip("-").isdigit():
        return None
    return items[int(position)] if -len(items) <= int(position) < len(items) else None


def _modified(value: str | list[str] | None, unknown: str, rest: str, variables: Variables) -> str | list[str]:
    """A value with what follows its name in the braces: defaults, prefixes and suffixes cut off, replacements."""
    match = re.match(r":?[-=+?]|%%?|##?|//?|,,|\^\^|:", rest)
    how = match.group() if match else ""
    argument = rest[len(how) :]
    is_set = value is not None and (value != "" if how.startswith(":") else True)
    if how in (":-", "-", ":=", "="):
        return value if is_set and value is not None else string(argument, variables)
    if how in (":+", "+"):
        return string(argument, variables) if is_set else ""
    if value is None:
        return unknown
    if isinstance(value, list):
        return value
    return _edited(value, how, argument, variables)


def _edited(value: str, how: str, argument: str, variables: Variables) -> str:
    if how in (",,", "^^"):
        return value.lower() if how == ",," else value.upper()
    if how in ("%", "%%", "#", "##"):
        return _cut(value, how, string(argument, variables))
    if how in ("/", "//"):
        pattern, _, new = argument.partition("/")
        old = string(pattern, variables)
        return value.replace(old, string(new, variables), -1 if how == "//" else 1) if old else value
    if how == ":":
        start, _, count = argument.partition(":")
        if start.strip().isdigit() and (not count or count.strip().isdigit()):
            return value[int(start) :][: int(count) if count else None]
    return value


def _cut(value: str, how: str, pattern: str) -> str:
    """`value` without the shortest (one sign) or longest (two) prefix (#) or suffix (%) that matches."""
    matches = re.compile(translate(pattern)).match
    prefix = how[0] == "#"
    cuts = [i for i in range(len(value) + 1) if matches(value[:i] if prefix else value[i:])]
    if not cuts:
        return value
    longest = len(how) == 2
    at = (max if longest == prefix else min)(cuts)
    return value[at:] if prefix else value[:at]
