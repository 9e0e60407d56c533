"""The page about the job file names every key, and the examples use none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nereus.core import plugins
from nereus.settings import resolve
from nereus.settings.schema import Settings, Sizes
from nereus.settings.source import known_paths

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([a-z_]+):?`", PAGE))


def test_every_key_is_explained() -> None:
    keys = {path.rpartition(".")[2] for path in known_paths(Settings)} | set(Sizes.model_fields)
    assert keys <= NAMED


@pytest.mark.parametrize("folder", ["algorithms", "tasks", "clusters", "controller.admission"])
def test_every_plugin_is_named(folder: str) -> None:
    assert set(plugins.names(f"nereus.{folder}")) <= NAMED


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*_*.yaml")), ids=lambda path: path.stem)
def test_examples_resolve(path: Path) -> None:
    assert resolve(path).run.steps > 0
