"""Reading a job file: overrides, defaults, relative paths, and errors that name the nearest key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nereus.core import SettingsError
from nereus.settings import Settings, resolve
from tests.settings.files import job


def test_defaults_fill_what_the_file_leaves_out(tmp_path: Path) -> None:
    settings = resolve(job(tmp_path))
    assert settings.admission.use == "payback"
    assert settings.run.directory == "runs/job"
    assert settings.sampling.temperature == 1.0


def test_resolved_settings_resolve_to_themselves(tmp_path: Path) -> None:
    settings = resolve(job(tmp_path, plan={"pin": {"actor/training": {"tp": 2}}}))
    again = tmp_path / "elsewhere" / "settings.yaml"
    again.parent.mkdir()
    again.write_text(yaml.safe_dump(settings.model_dump(mode="json", exclude_none=True)))
    assert resolve(again) == settings


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("run.steps=10", "run", "steps", 10),
        ("plan.tp=[1, 2]", "plan", "tp", (1, 2)),
        ("optimizer.actor={lr: 1e-3}", "optimizer", "actor.lr", 1e-3),
        ("optimizer.actor.lr=1e-3", "optimizer", "actor.lr", 1e-3),
        ("monitor.length_threshold=.5", "monitor", "length_threshold", 0.5),
        ("precision=bf16", "", "precision", "bf16"),
        ("plan.pin.actor/training.tp=2", "plan", "pin.actor/training.tp", 2),
        ("recorders.0.use=mine", "", "recorders.0.use", "mine"),
    ],
)
def test_overrides_set_one_key(tmp_path: Path, override: str, section: str, key: str, value: object) -> None:
    path = job(tmp_path, recorders=[{"use": "jsonl"}])
    changed, before = resolve(path, [override]).model_dump(), resolve(path).model_dump()
    node = changed
    for part in [*([section] if section else []), *key.split(".")]:
        node = node[int(part)] if part.isdecimal() else node[part]  # type: ignore[index]
    assert node == value
    top = override.partition("=")[0].partition(".")[0]
    assert {k: v for k, v in changed.items() if k != top} == {k: v for k, v in before.items() if k != top}


def test_later_overrides_win(tmp_path: Path) -> None:
    assert resolve(job(tmp_path), ["run.steps=1", "run.steps=2"]).run.steps == 2


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("workload.mini_bach=4", "workload.mini_batch"),
        ("samples_per_prompt=4", "workload.samples_per_prompt"),
        ("optimiser.actor.lr=1", "optimizer"),
        ("optimizer.actor.learning=1", None),
        ("plan.pin.actor/training.ttp=2", "plan.pin.actor/training.tp"),
        ("models.referense=x", "models.reference"),
        ("recorder=3", "recorders"),
    ],
)
def test_unknown_keys_name_the_nearest_with_its_whole_path(tmp_path: Path, override: str, nearest: str | None) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(job(tmp_path), [override])
    key = override.partition("=")[0].removesuffix(".actor.lr" if override.startswith("optimiser") else "\0")
    assert f"unknown key {key!r}" in str(caught.value)
    if nearest is not None:
        assert f"did you mean {nearest!r}?" in str(caught.value)


def test_unknown_keys_of_models_given_by_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"unknown key 'models.actor.layrs'; did you mean 'models.actor.layers'"):
        resolve(job(tmp_path, models={"actor": {"family": "llama", "layrs": 3}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": {"prompts": 0, "mini_batch": 1, "expected_response_tokens": 1}}, r"workload\.prompts is 0: "),
        ({"workload": None}, "workload is missing"),
        ({"workload": {"prompts": 4}}, r"workload\.mini_batch is missing"),
        ({"precision": "int4"}, "precision is 'int4': "),
        ({"sampling": {"top_p": 1.5}}, r"sampling\.top_p is 1\.5: "),
        ({"algorithm": "ppo"}, "algorithm is 'ppo'"),
        ({"run": {"directory": 3}}, r"run\.directory is 3: "),
        ({"run": {"timeout_s": float("inf")}}, r"run\.timeout_s is inf: "),
        ({"optimizer": {"actor": {"betas": [0.9, 1.0]}}}, r"optimizer\.actor\.betas\.1 is 1\.0: "),
    ],
)
def test_wrong_values_name_the_key_and_the_value(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve(job(tmp_path, **changes))


@pytest.mark.parametrize("value", ["&a [*a]", "&a {x: *a}", "[" * 3000])
def test_yaml_without_an_end_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError, match="--set models: not YAML"):
        resolve(job(tmp_path), [f"models={value}"])


@pytest.mark.parametrize("override", ["run.steps", "=3", "run..steps=3"])
def test_overrides_need_a_key_and_a_value(tmp_path: Path, override: str) -> None:
    with pytest.raises(SettingsError, match=r"expected KEY\.KEY=VALUE"):
        resolve(job(tmp_path), [override])


def test_an_override_cannot_go_into_a_value(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"run\.steps is 3, it has no keys"):
        resolve(job(tmp_path), ["run.steps.many=3"])


def test_an_index_must_be_in_the_list(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'4' is not an index of a list of 1"):
        resolve(job(tmp_path, recorders=[{"use": "jsonl"}]), ["recorders.4.use=x"])


def test_paths_in_the_file_are_relative_to_it_and_overrides_to_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job(tmp_path, cluster={"use": "trace", "path": "pool.csv", "pool": {"use": "file", "path": "node.yaml"}})
    monkeypatch.chdir("/")
    settings = resolve(path, ["models.critic=models/critic"])
    assert settings.models.actor == str(tmp_path / "actor")
    assert settings.models.critic == "/models/critic"
    assert settings.cluster.options["path"] == str(tmp_path / "pool.csv")
    assert settings.cluster.options["pool"]["path"] == str(tmp_path / "node.yaml")


def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job(tmp_path).read_text() + "admission: {use: payback, margin: 5e-1}\n")
    assert resolve(path).admission.options == {"margin": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {steps: 1}\nrun: {steps: 2}", "'run' appears twice"),
        ("run: [", "not YAML"),
        ("? [run]\n: 1", "a key must be plain text"),
        ("- 1", "expected a mapping with the keys algorithm, task"),
        ("!!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_files_that_are_no_job_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        resolve(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no\.yaml: cannot be read"):
        resolve(tmp_path / "no.yaml")


def test_settings_cannot_be_changed(tmp_path: Path) -> None:
    settings: Settings = resolve(job(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        settings.precision = "bf16"
