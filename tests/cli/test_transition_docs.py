"""The page about transitions names every flag and every key of the JSON, and what it shows is what is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from nereus.cli import app
from tests.cli.command import Command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "transitions.md").read_text(encoding="utf-8")
FIG_6 = (ROOT / "examples/fig6/from.json", ROOT / "examples/fig6/to.json")


def timeless(text: str) -> list[str]:
    """Lines up to the critical path, without seconds."""
    lines = text.partition("critical path:")[0].strip().splitlines()
    return [re.sub(r"[\d.,e-]+ to [\d.,e-]+ s|in [\d.,e-]+ s|, critical", "", line).rstrip() for line in lines]


def test_every_flag_is_explained() -> None:
    command = typer.main.get_command(app).commands["diff"]  # type: ignore[attr-defined]
    flags = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    assert not {flag for flag in flags if not re.search(rf"{flag}\b", PAGE)} - {"--help"}


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from keys(item)
    elif isinstance(value, list):
        for item in value[:1]:
            yield from keys(item)


def test_every_key_of_the_json_is_explained(nereus: Command) -> None:
    data = json.loads(nereus("diff", *FIG_6, "--json").out)
    data.pop("goal")
    data["bytes"] = data["bytes"].popitem()[1]
    assert set(keys(data)) - {"layout"} <= set(re.findall(r"`([a-z0-9_]+)`", PAGE))


def test_the_picture_is_the_one_of_the_page_that_is_written(nereus: Command, tmp_path: Path) -> None:
    """But for seconds: what each bar is, its row and its colour."""
    page = tmp_path / "fig6.html"
    nereus("diff", *FIG_6, "--html", page)
    bars = re.compile(r'y="(\d+)"[^>]*fill="(#\w+)"[^>]*><title>([^;]+);')
    shown = bars.findall((ROOT / "docs" / "fig6.svg").read_text(encoding="utf-8"))
    assert shown
    assert shown == bars.findall(page.read_text(encoding="utf-8"))


def test_the_front_page_shows_lines_that_are_printed(nereus: Command) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("$ nereus diff examples/fig6/from.json examples/fig6/to.json\n")[2].partition("\n```")[0]
    printed = timeless(nereus("diff", *FIG_6).out)
    assert [line for line in timeless(shown) if line != "..." and line not in printed] == []


def test_the_output_shown_is_what_is_printed(nereus: Command) -> None:
    """But for seconds, which follow the cost model, and the directory."""
    shown = PAGE.partition("$ nereus diff examples/fig6/from.json examples/fig6/to.json\n")[2].partition("\n```")[0]
    printed = nereus("diff", *FIG_6).out.replace(f"{ROOT}/", "")
    assert timeless(printed) == timeless(shown)
