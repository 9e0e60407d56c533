"""The page about planning names every flag and every key of the JSON."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from nereus.cli import app
from nereus.core import Capabilities
from nereus.planning.problem import Problem
from nereus.report import plan_json
from nereus.report.answer import answer
from tests.controller.world import WORKFLOW
from tests.fakes import cluster, workload

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


def test_every_flag_of_plan_is_explained() -> None:
    command = typer.main.get_command(app).commands["plan"]  # type: ignore[attr-defined]
    flags = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    missing = {flag for flag in flags if not re.search(rf"`{flag}\b", PAGE)} - {"--advice", "--help"}
    assert not missing
    assert "`--no-advice`" in PAGE


def test_every_key_of_the_json_is_explained() -> None:
    able = Capabilities(recompute=("none",))
    found = plan_json.of(answer(Problem(WORKFLOW, workload(), cluster(1), able), widest=able, top=1, advise=False), "x")
    keys = set(found) | set(found["calls"][0]) - {"call", "model_stage"}
    named = set(re.findall(r"`([a-z0-9_]+)`", PAGE))
    assert keys <= named
