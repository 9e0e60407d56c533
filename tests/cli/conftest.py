from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Command


@pytest.fixture
def nereus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command, given in an empty directory."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return Command(monkeypatch, capsys)
