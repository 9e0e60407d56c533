"""`nereus check`, `plan` and `list`: what they print, and that they leave nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from nereus.core import Plan, codec
from nereus.settings import resolve
from tests.cli.command import Command
from tests.settings.files import job

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL_STAGES = ("actor/generation", "reference/inference", "reward/inference", "actor/training", "critic/training")


def test_check_prints_the_resolved_settings_as_yaml(nereus: Command, tmp_path: Path) -> None:
    path = job(tmp_path)
    answer = nereus("check", path, "--set", "run.steps=7")
    assert (answer.code, answer.err) == (0, "")
    again = tmp_path / "again.yaml"
    again.write_text(answer.out)
    assert resolve(again) == resolve(path, ["run.steps=7"])


def test_check_as_json_names_the_first_plan(nereus: Command, tmp_path: Path) -> None:
    answer = nereus("check", job(tmp_path), "--json")
    data = json.loads(answer.out)
    assert data["settings"]["run"]["steps"] == 3
    assert all(model_stage in data["plan"] for model_stage in MODEL_STAGES)


def test_plan_shows_every_model_stage_and_what_limits_the_step(nereus: Command, tmp_path: Path) -> None:
    answer = nereus("plan", job(tmp_path))
    assert (answer.code, answer.err) == (0, "")
    for text in MODEL_STAGES:
        assert text in answer.out


def test_plan_as_json_holds_a_plan_that_reads_back(nereus: Command, tmp_path: Path) -> None:
    data = json.loads(nereus("plan", job(tmp_path), "--json").out)
    found: Plan = codec.decode(Plan, data["plan"])
    assert {str(ms) for ms in found.model_stages} == set(MODEL_STAGES)
    assert found.devices <= {0, 1, 2, 3}


def test_plan_for_fewer_devices_uses_only_those(nereus: Command, tmp_path: Path) -> None:
    data = json.loads(nereus("plan", job(tmp_path), "--devices", 2, "--json").out)
    found: Plan = codec.decode(Plan, data["plan"])
    assert found.devices <= {0, 1}


def test_plan_follows_pins(nereus: Command, tmp_path: Path) -> None:
    answer = nereus("plan", job(tmp_path), "--json", "--set", "plan.pin.actor/training={tp: 2, pp: 2}")
    found: Plan = codec.decode(Plan, json.loads(answer.out)["plan"])
    actor = next(a.candidate for a in found.assignments if str(a.candidate.model_stage) == "actor/training")
    assert (actor.layout.tp, actor.layout.pp) == (2, 2)


def test_the_bare_example_is_checked_and_planned(nereus: Command) -> None:
    assert nereus("check", EXAMPLES / "bare.yaml").code == 0
    assert nereus("plan", EXAMPLES / "bare.yaml").code == 0


@pytest.mark.parametrize("name", ["ppo_counting", "grpo_counting", "remax_counting"])
def test_examples_name_only_keys_that_exist(name: str) -> None:
    assert resolve(EXAMPLES / f"{name}.yaml").run.steps == 60


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("algorithms", {"ppo", "grpo", "remax"}),
        ("families", {"llama", "qwen2", "qwen3"}),
        ("tasks", {"counting", "jsonl"}),
        ("clusters", {"local", "trace", "file"}),
        ("admission", {"payback", "always", "every_n", "never"}),
        ("recorders", {"jsonl"}),
    ],
)
def test_list_names_the_files_and_what_they_say_of_themselves(nereus: Command, kind: str, names: set[str]) -> None:
    found = json.loads(nereus("list", kind, "--json").out)
    assert names <= set(found)
    assert all(found.values())
    assert all(name in nereus("list", kind).out for name in names)


def test_list_of_something_else_names_the_choices(nereus: Command) -> None:
    answer = nereus("list", "planets")
    assert (answer.code, answer.out) == (2, "")
    assert "algorithms, families, tasks, clusters, admission" in answer.err


def test_capacity_too_small_says_how_much_would_do(nereus: Command, tmp_path: Path) -> None:
    path = job(tmp_path)
    answer = nereus("check", path, "--set", "cluster.capacity=200 KiB")
    assert (answer.code, answer.out) == (3, "")
    assert re.search(r"device \d", answer.err)
    enough = max(int(found.replace(",", "")) for found in re.findall(r"([\d,]{5,}) bytes", answer.err))
    assert nereus("check", path, "--set", f"cluster.capacity={enough}").code == 0
    assert nereus("check", path, "--set", f"cluster.capacity={int(enough * 0.98)}").code == 3


def test_the_resolved_settings_of_a_trace_are_valid_yaml(nereus: Command, tmp_path: Path) -> None:
    (tmp_path / "pool.csv").write_text("step,devices\n0,2\n5,3\n")
    pool = {"devices": 3, "capacity": "64 MiB", "speed": 0.3}
    answer = nereus("check", job(tmp_path, cluster={"use": "trace", "path": "pool.csv", "pool": pool}))
    assert answer.code == 0
    assert yaml.safe_load(answer.out)["cluster"]["pool"] == pool
