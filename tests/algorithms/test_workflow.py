"""The calls of each algorithm, and options that are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from nereus.core import Lengths, ModelSpec, SettingsError, Work, Workload, plugins

SPEC = ModelSpec("llama", 2, 64, 4, 2, 16, 128, 16)
SPECS = dict.fromkeys(("actor", "critic", "reward", "reference"), SPEC)


def algorithm(name: str, **options: Any) -> Any:
    return plugins.make("nereus.algorithms", name, options)


def workload(samples_per_prompt: int) -> Workload:
    return Workload(4, samples_per_prompt, Lengths.constant(3), Lengths.constant(9), 4 * samples_per_prompt, 9)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        (
            "ppo",
            "generate reference_log_probs reward_scores old_log_probs values update_actor update_critic",
        ),
        ("grpo", "generate reference_log_probs reward_scores old_log_probs update_actor"),
        (
            "remax",
            "generate generate_greedy reference_log_probs reward_scores greedy_reward_scores old_log_probs "
            "update_actor",
        ),
    ],
)
def test_calls_are_named_as_users_meet_them(name: str, calls: str) -> None:
    assert [call.name for call in algorithm(name).workflow(SPECS).calls] == calls.split()


@pytest.mark.parametrize("name", plugins.names("nereus.algorithms"))
@pytest.mark.parametrize("reward_model", [True, False])
def test_a_workflow_is_complete(name: str, reward_model: bool) -> None:
    chosen = algorithm(name, reward_model=reward_model)
    workflow = chosen.workflow(SPECS)
    written = {"prompts"} | {column for call in workflow.calls for column in call.writes}
    assert {column for call in workflow.calls for column in call.reads} <= written
    assert [tuple(map(str, sync)) for sync in workflow.weight_syncs] == [("actor/training", "actor/generation")]
    assert ("reward" in chosen.models()) is reward_model
    assert set(workflow.specs) == set(chosen.models())
    for call in workflow.calls:
        assert bool(chosen.outputs(call.name)) is (call.work is not Work.GENERATE)
    for update in (call for call in workflow.calls if call.work is Work.UPDATE):
        assert set(update.reads) == written, "its advantages are made from everything"


def test_updates_come_after_everything_they_are_made_from() -> None:
    order = algorithm("ppo").workflow(SPECS).order()
    assert order[0] == "generate"
    assert set(order[-2:]) == {"update_actor", "update_critic"}


def test_a_missing_model_is_named() -> None:
    with pytest.raises(SettingsError, match="critic"):
        algorithm("ppo").workflow({name: SPEC for name in SPECS if name != "critic"})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("ppo", "clip", 0.0),
        ("ppo", "clip", float("nan")),
        ("ppo", "gamma", 1.01),
        ("ppo", "lam", -0.1),
        ("ppo", "value_clip", 0.0),
        ("grpo", "kl_coefficient", -1.0),
        ("remax", "entropy_coefficient", -0.5),
        ("grpo", "clip", "wide"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(name: str, option: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=name):
        algorithm(name, **{option: value})


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'clip'"):
        algorithm("grpo", clipp=0.2)


def test_grpo_refuses_groups_of_one() -> None:
    algorithm("grpo").check(workload(2))
    algorithm("ppo").check(workload(1))
    with pytest.raises(SettingsError, match="samples_per_prompt is 1"):
        algorithm("grpo").check(workload(1))


def test_algorithms_need_no_torch() -> None:
    modules = ", ".join(f"nereus.algorithms.{name}" for name in plugins.names("nereus.algorithms"))
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
