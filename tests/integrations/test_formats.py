"""The forms a configuration comes in, and what is said when it cannot be read."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import NereusError, SettingsError
from nereus.integrations import FRAMEWORKS, Imported, Refusal, RefusedImportError, read, read_text
from tests.integrations import texts

FLAT: dict[str, Any] = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B",
    "data.train_batch_size": 128,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": -1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.7,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "trainer.nnodes": 2,
    "trainer.n_gpus_per_node": 4,
}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        node = found
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return found


FORMS = {
    "lines.txt": "\n".join(f"{key}={value}" for key, value in FLAT.items()),
    "lines with comments": "# a job\n\n" + " \\\n".join(f"+{key}='{value}'" for key, value in FLAT.items()),
    "flat.json": json.dumps(FLAT),
    "texts.json": json.dumps({key: str(value) for key, value in FLAT.items()}),
    "nested.json": json.dumps(nested(FLAT)),
    "list.json": json.dumps([f"{key}={value}" for key, value in FLAT.items()]),
    "record.json": json.dumps({"repo": "a/b", "overrides": FLAT}),
    "nested.yaml": yaml.safe_dump(nested(FLAT)),
    "list.yaml": yaml.safe_dump([f"{key}={value}" for key, value in FLAT.items()]),
    "run.sh": "python3 -m verl.trainer.main_ppo " + " \\\n  ".join(f"{key}={value}" for key, value in FLAT.items()),
    "run without ending": "#!/usr/bin/env bash\npython3 main.py " + " ".join(f"{k}={v}" for k, v in FLAT.items()),
}


def plain(found: Imported) -> Imported:
    return replace(found, defaults=dict(found.defaults))


@pytest.mark.parametrize("name", FORMS)
def test_every_form_says_the_same(name: str) -> None:
    found = read_text("verl", FORMS[name], name)
    assert plain(found) == plain(read_text("verl", FORMS["flat.json"], "flat.json"))
    assert (found.devices, found.batch.prompts, found.kv_share) == (8, 128, 0.7)


def refusal(framework: str, text: str, name: str = "run.sh", **variables: str) -> RefusedImportError:
    with pytest.raises(RefusedImportError) as error:
        read_text(framework, text, name, variables)
    return error.value


def test_lines_of_flags_may_have_several_values_and_unknown_words() -> None:
    text = "--num-rollout 8\n--eval-prompt-data aime a.jsonl\n--rollout-batch-size 32\n--colocate ${MODEL_ARGS[@]}\n"
    text += "--n-samples-per-prompt 8\n--global-batch-size 256\n--actor-num-nodes 2\n--actor-num-gpus-per-node 8\n"
    found = read_text("slime", text, "flags.txt")
    assert (found.devices, found.colocated, found.batch.prompts) == (16, True, 32)


def test_more_devices_than_a_cluster_may_have_are_refused() -> None:
    error = refusal("openrlhf", "python train.py --actor.num_nodes 3987742429217623 --train.batch_size 8")
    assert error.reason is Refusal.INVALID
    assert "at most 131,072 are valid" in str(error)
    error = refusal("openrlhf", "python train.py --vllm.num_engines -1 --train.batch_size 8")
    assert "--vllm.num_engines=-1: valid are 0 (none) and more" in str(error)


def test_what_is_neither_keys_nor_flags_says_what_is_read() -> None:
    with pytest.raises(
        RefusedImportError, match=r"notes.txt: neither a mapping of keys nor lines of key=value"
    ) as error:
        read_text("slime", "some words\nof a letter\n", "notes.txt")
    assert error.value.reason is Refusal.UNREADABLE


def test_an_unset_variable_is_named_with_its_line_and_key_and_can_be_given() -> None:
    text = "#!/bin/bash\n\npython3 -m verl.trainer.main_ppo data.train_batch_size=8 \\\n  trainer.nnodes=$WORLD\n"
    error = refusal("verl", text)
    assert error.reason is Refusal.UNRESOLVED
    for part in ("run.sh line 3", "trainer.nnodes", "WORLD", "WORLD=VALUE"):
        assert part in str(error)
    assert read_text("verl", text, "run.sh", {"WORLD": "4"}).nodes == 4
    assert read_text("verl", text, "run.sh", {"trainer.nnodes": "4"}).nodes == 4


def test_a_variable_that_a_condition_decides_is_named_with_the_condition() -> None:
    text = "N=1\nif nvidia-smi; then\n N=8\nfi\npython3 x.py trainer.n_gpus_per_node=$N data.train_batch_size=8"
    assert "N depends on the condition in line 2" in str(refusal("verl", text))


def test_an_unset_variable_that_the_answer_can_do_without_is_listed() -> None:
    found = read_text("verl", "python3 x.py data.train_batch_size=8 actor_rollout_ref.rollout.name=$ENGINE", "run.sh")
    assert any("actor_rollout_ref.rollout.name" in line and "ENGINE" in line for line in found.unresolved)


def test_a_default_of_a_missing_argument_counts() -> None:
    text = json.dumps({"trainer.nnodes": "${1:-3}", "data.train_batch_size": "8"})
    assert read_text("verl", text, "a.json").nodes == 3


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("run.sh", "A=1\npython3 x.py 'data.train_batch_size=8\n", ["run.sh line 2", "never closed"]),
        ("a.json", '{"trainer.nnodes": 1,\n "x" 2}', ["a.json line 2", "not JSON"]),
        ("a.yaml", "trainer:\n  nnodes: [1\n", ["a.yaml line 3", "not YAML"]),
        ("a.yaml", "- 1\n- 2", ["none of its keys"]),
        ("a.yaml", "just text", ["neither a mapping of keys nor lines"]),
        ("a.json", "3", ["expected an object"]),
        ("a.yaml", "model: x\noptimizer: y", ["none of its keys", "actor_rollout_ref"]),
        ("run.sh", "echo hello\n", ["none of its keys"]),
    ],
)
def test_what_cannot_be_read_says_where(name: str, text: str, parts: list[str]) -> None:
    error = refusal("verl", text, name)
    assert error.reason in (Refusal.UNREADABLE, Refusal.FOREIGN)
    assert all(part in str(error) for part in parts), str(error)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("trainer.nnodes", "two", "must be a whole number"),
        ("trainer.nnodes", "1.5", "must be a whole number"),
        ("trainer.nnodes", "0", "no devices"),
        ("trainer.n_gpus_per_node", "-8", "no devices"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "0", "must be at least 1"),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", "-2", "must be at least 1"),
        ("actor_rollout_ref.actor.use_dynamic_bsz", "maybe", "must be true or false"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", "much", "must be a number"),
    ],
)
def test_a_bad_value_is_refused_with_its_key(key: str, value: str, part: str) -> None:
    error = refusal("verl", json.dumps(FLAT | {key: value}), "a.json")
    assert key in str(error)
    assert part in str(error)


@pytest.mark.parametrize(
    ("framework", "text", "name", "reason"),
    [
        ("slime", "python3 train.py --rollout-batch-size 8 --actor-num-nodes 1", "a.sh", Refusal.NO_DEVICES),
        ("slime", "python3 train.py --colocate --actor-num-nodes 1", "a.sh", Refusal.NO_BATCH),
        ("nemo-rl", "cluster: {num_nodes: 1, gpus_per_node: 8}\npolicy: {}", "a.yaml", Refusal.NO_BATCH),
        ("nemo-rl", "grpo: {num_prompts_per_step: 8}\npolicy: {}", "a.yaml", Refusal.NO_DEVICES),
        ("roll", "rollout_batch_size: 8", "a.yaml", Refusal.NO_DEVICES),
        ("roll", "actor_train: {device_mapping: 'range(8)'}", "a.yaml", Refusal.INVALID),
        ("areal", "cluster: {n_nodes: 1}\nallocation_mode: sglang:d4+d4", "a.yaml", Refusal.NO_BATCH),
        ("areal", "train_dataset: {batch_size: 8}\nallocation_mode: sglang:q4+d4", "a.yaml", Refusal.INVALID),
        ("openrlhf", "x --actor.num_nodes 0", "a.sh", Refusal.NO_DEVICES),
    ],
)
def test_refusals_come_from_the_closed_list(framework: str, text: str, name: str, reason: Refusal) -> None:
    assert refusal(framework, text, name).reason is reason


def test_a_missing_file_and_an_unknown_framework(tmp_path: Path) -> None:
    with pytest.raises(RefusedImportError, match="cannot be read"):
        read("verl", tmp_path / "none.sh")
    with pytest.raises(SettingsError, match="did you mean 'verl'"):
        read("verll", tmp_path / "none.sh")


def test_a_missing_base_file_is_named() -> None:
    error = refusal("nemo-rl", "defaults: ../grpo_math_1B.yaml\ncluster: {num_nodes: 2, gpus_per_node: 8}", "a.yaml")
    assert "../grpo_math_1B.yaml" in str(error)


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just("${x}"), st.just([])
)
KEYS = [
    *FLAT,
    *("rollout_batch_size", "allocation_mode", "actor_train.device_mapping", "grpo.num_prompts_per_step", "policy"),
    *("cluster.num_nodes", "cluster.gpus_per_node", "--rollout-batch-size", "--colocate", "--actor.num_nodes", "actor"),
    *("--vllm.num_engines", "train_dataset.batch_size", "cluster.n_nodes", "actor_infer.device_mapping"),
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FRAMEWORKS), st.dictionaries(st.sampled_from(KEYS), values, max_size=8), st.booleans())
def test_any_values_are_imported_or_refused(framework: str, data: dict[str, Any], as_tree: bool) -> None:
    tree = nested({key: value for key, value in data.items() if key not in ("actor", "policy")})
    with suppress(NereusError):
        read_text(framework, yaml.safe_dump(tree) if as_tree else json.dumps(data), "a.yaml" if as_tree else "a.json")


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([("verl", texts.VERL), ("slime", texts.SLIME), ("roll", texts.ROLL), ("areal", texts.AREAL)]),
    st.data(),
)
def test_any_damage_to_a_file_is_read_or_refused(case: tuple[str, str], data: st.DataObject) -> None:
    framework, text = case
    start = data.draw(st.integers(0, len(text)))
    damage = data.draw(
        st.sampled_from(["", "'", '"', "(", "${", "}", "\n", ":", "$((1/0))", "<<E\n", "\\", "- [", "\t", "&a"])
    )
    text = text[:start] + damage + text[start + data.draw(st.integers(0, 30)) :]
    with suppress(NereusError):
        read_text(framework, text, "a.sh" if framework in ("verl", "slime") else "a.yaml")
