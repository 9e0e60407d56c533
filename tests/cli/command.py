"""Runs the command in this process, as a shell would see it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from nereus import cli


@dataclass(frozen=True)
class Answer:
    """What a command printed and its exit code."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Command:
    """`nereus ARGUMENTS`."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Answer:
        self.monkeypatch.setattr(sys, "argv", ["nereus", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = self.capsys.readouterr()
        return Answer(int(caught.value.code or 0), out, err)
