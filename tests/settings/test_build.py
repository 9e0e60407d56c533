"""From settings to the values the rest of the project is given, and the bad input that is refused on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nereus import settings as build
from nereus.core import Boundary, Head, ModelStage, SettingsError
from nereus.settings.build import expected_lengths
from nereus.trainer.config import JobConfig
from tests.settings.files import job, model_dir

SIZES = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 128, "vocab": 16}


def made(path: Path, *overrides: str) -> JobConfig:
    settings = build.resolve(path, overrides)
    build.admission_rule(settings)
    build.problem(settings)
    return build.job_config(settings)


def test_a_job_is_built_whole(tmp_path: Path) -> None:
    config = made(job(tmp_path), "optimizer.actor={lr: 1e-3, lr_end: 2e-3}", "run.seed=5")
    assert set(config.models) == {"actor", "reference", "reward", "critic"}
    assert config.models["reference"] == config.models["actor"]
    assert [config.specs[role].head for role in ("actor", "reward", "critic")] == [Head.LM, Head.SCALAR, Head.SCALAR]
    assert set(config.optimizers) == {"actor", "critic"}
    assert config.optimizers["actor"].rate(3 * 2) == pytest.approx(2e-3)
    assert config.workload.prompt.maximum == 3
    assert config.seed == 5


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_precision_is_the_dtype_of_every_model(tmp_path: Path, precision: str) -> None:
    config = made(job(tmp_path, precision=precision))
    assert {spec.dtype for spec in config.specs.values()} == {precision}


def test_the_seed_of_the_run_is_the_seed_of_the_task_unless_it_has_its_own(tmp_path: Path) -> None:
    path = job(tmp_path)
    orders = [
        [made(path, *overrides).task.prompt(index).tokens for index in range(20)]
        for overrides in (("run.seed=1",), ("run.seed=2",), ("run.seed=2", "task.seed=1"))
    ]
    assert orders[0] == orders[2] != orders[1]


def test_expected_lengths_have_the_tail_of_a_constant_chance_to_end() -> None:
    lengths = expected_lengths(mean=6, sequences=64, limit=56)
    assert lengths.mean == 6
    assert lengths.p95 == pytest.approx(18, abs=0.1)
    assert 24 < lengths.maximum < 36
    assert expected_lengths(mean=50, sequences=64, limit=56).maximum == 56


def test_an_algorithm_without_a_critic_needs_no_critic(tmp_path: Path) -> None:
    path = job(tmp_path, models={"actor": "actor", "reward": "reward"})
    config = made(path, "algorithm.use=grpo", "workload.samples_per_prompt=2")
    assert set(config.models) == {"actor", "reference", "reward"}
    with pytest.raises(SettingsError, match=r"models\.critic is missing: ppo needs a model for"):
        made(path)


def test_models_by_sizes_can_be_planned_but_not_trained(tmp_path: Path) -> None:
    path = job(tmp_path, models=dict.fromkeys(("actor", "reward", "critic"), SIZES))
    settings = build.resolve(path)
    assert build.specs(settings)["critic"].head is Head.SCALAR
    assert build.problem(settings, devices=3).cluster.ids == (0, 1, 2)
    with pytest.raises(SettingsError, match="9 devices, the cluster has 1 to 4"):
        build.problem(settings, devices=9)
    with pytest.raises(SettingsError, match=r"models\.actor is not given by a directory"):
        build.job_config(settings)


def test_planning_alone_needs_no_task(tmp_path: Path) -> None:
    settings = build.resolve(job(tmp_path, task=None), ["workload.expected_prompt_tokens=9"])
    assert build.workload(settings).prompt.mean == 9
    with pytest.raises(SettingsError, match="task is missing"):
        build.job_config(settings)
    with pytest.raises(SettingsError, match="expected_prompt_tokens is missing"):
        build.workload(build.resolve(job(tmp_path, task=None)))


def test_pins_reach_the_planner(tmp_path: Path) -> None:
    config = made(job(tmp_path, plan={"tp": [1, 2], "pin": {"actor/training": {"tp": 2, "devices": [0, 1]}}}))
    pin = config.capabilities.pin(ModelStage.parse("actor/training"))
    assert (config.capabilities.tp, pin.tp, pin.devices, pin.pp) == ((1, 2), 2, (0, 1), None)


def test_a_host_may_need_equal_shares(tmp_path: Path) -> None:
    path = job(tmp_path)
    assert made(path).capabilities.uneven_shares
    assert not made(path, "plan.batch=exact").capabilities.uneven_shares
    with pytest.raises(SettingsError, match=r"shares must be equal.*the nearest valid DP are 2 and 4"):
        made(path, "plan.batch=exact", "plan.pin={actor/training: {dp: 3}}", "cluster.devices=4")


def test_a_trace_makes_devices_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "pool.csv").write_text("step,devices\n0,1\n2,3\n")
    pool = {"use": "local", "devices": 3, "capacity": "1 GiB", "speed": 0.1}
    source = build.cluster_source(
        build.resolve(job(tmp_path, cluster={"use": "trace", "path": "pool.csv", "pool": pool}))
    )
    assert [len(source.available(Boundary(step, 0.0))) for step in (0, 1, 2)] == [1, 1, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": "many"}, r"cluster\.pool\.devices is 'many'"),
        ({"devices": 2.5}, r"cluster\.pool\.devices is 2\.5"),
        ({"oversubscribe": "maybe"}, r"cluster\.pool\.oversubscribe is 'maybe'"),
        ({"sped": 1}, r"unknown key 'cluster\.pool\.sped'; did you mean 'cluster\.pool\.speed'"),
        ({"use": 3}, r"cluster\.pool\.use is 3"),
    ],
)
def test_the_pool_of_a_trace_is_a_section_like_others(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "pool.csv").write_text("step,devices\n0,1\n")
    pool = {"devices": 3, "capacity": "1 GiB", "speed": 0.1, **change}
    settings = build.resolve(job(tmp_path, cluster={"use": "trace", "path": "pool.csv", "pool": pool}))
    with pytest.raises(SettingsError, match=message):
        build.cluster_source(settings)


def test_thresholds_and_rule_follow_the_file(tmp_path: Path) -> None:
    settings = build.resolve(job(tmp_path, admission={"use": "payback", "margin": 0.25}), ["monitor.lookahead_steps=5"])
    assert build.admission_rule(settings).margin == 0.25
    assert build.thresholds(settings).lookahead_steps == 5
    assert build.thresholds(settings).length == 0.30


def test_recorders_write_into_the_run_directory(tmp_path: Path) -> None:
    (recorder,) = build.recorders(build.resolve(job(tmp_path)), tmp_path / "run")
    assert vars(recorder)["directory"] == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.pin.actor/training.tp=3"], r"tp pinned to 3, but the model has 4 heads .* valid TP 1, 2, 4"),
        (["plan.tp=[3]"], r"plan\.tp is 3: actor/generation .* valid degrees: 1, 2, 4"),
        (
            ["plan.pin.critic/training.pp=5", "cluster.devices=16", "cluster.speed=0.05"],
            "pp pinned to 5, but the model has 4 layers",
        ),
        (["plan.pp=[5, 6]"], r"plan\.pp is 5, 6, all beyond the 4 layers"),
        (["plan.pin.actor/trainin.tp=1"], "did you mean 'actor/training'"),
        (["plan.pin.actor/training={tp: 4, dp: 2}"], "needs 8 devices, the cluster never has more than 4"),
        (["plan.pin.actor/training.devices=[0, 9]"], r"pinned to devices \[9\], there are \[0, 1, 2, 3\]"),
        (["plan.pin.actor/training={tp: 4, devices: [0]}"], "needs 4 devices, it names 1"),
        (["plan.pin.actor/training.devices=[0, 0]"], "names a device twice"),
        (["plan.pin.actor/training={dp: 3, micro_batch: 4}"], "the largest share is 3 sequences"),
        (["plan.pin.actor/training.dp=9", "cluster.devices=16", "cluster.speed=0.05"], "a mini-batch has 8 sequences"),
        (["workload.mini_batch=5"], "mini_batch 5 does not divide the batch of 16 sequences"),
        (["cluster.speed=0.9", "cluster.cores=2"], r"4 devices x speed 0\.9 = 3\.6 cores, 2 are here"),
        (["cluster.capacity=12 parsecs"], "is not a size"),
        (["cluster.sped=1"], r"unknown key 'cluster\.sped'; did you mean 'cluster\.speed'"),
        (["cluster={use: local, devices: 2}"], r"cluster\.capacity is missing"),
        (["cluster.devices=lots"], r"cluster\.devices is 'lots': "),
        (["cluster.devices=true"], r"cluster\.devices is True: input should be a number"),
        (["cluster.capacity=true"], r"cluster\.capacity is True: input should be a number"),
        (["run.steps=true"], r"run\.steps is True: input should be a number"),
        (["algorithm.clip=yes"], r"algorithm\.clip is True: input should be a number"),
        (["algorithm.kl_coeff=0.1"], r"did you mean 'algorithm\.kl_coefficient'"),
        (["algorithm.use=pppo"], "did you mean 'ppo'"),
        (["algorithm.clip=-1"], "clip is -1"),
        (["algorithm.use=grpo"], "samples_per_prompt is 1, must be at least 2"),
        (["admission.margin=2"], "margin 2"),
        (["reward.model_weight=0"], "the reward model would run for nothing"),
        (["algorithm.reward_model=false"], "runs no reward model"),
        (["workload.expected_response_tokens=90"], "above sampling.max_response_tokens 56"),
        (["sampling.max_response_tokens=300"], "exceed the 128 positions of models.actor"),
        (["run.evaluate_every=5", "task.held_out_digits=[]"], "holds out no prompts"),
        (["task.cap=0"], "cap is 0"),
    ],
)
def test_bad_input_is_refused_with_the_valid_choices(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        made(job(tmp_path), *overrides)


@pytest.mark.parametrize(
    ("role", "change", "message"),
    [
        ("actor", {"drop": "model.layers.2.mlp.up_proj.weight"}, r"tensor model\.layers\.2\.mlp\.up_proj\.weight is m"),
        ("critic", {"shapes": {"model.norm.weight": [63]}}, r"model\.norm\.weight has shape \[63\]"),
        ("reward", {"head": Head.LM}, r"score\.weight is missing"),
        ("reward", {"vocab": 8}, "vocabulary of 8 tokens, the actor one of 16"),
    ],
)
def test_broken_model_directories_are_refused(tmp_path: Path, role: str, change: dict[str, Any], message: str) -> None:
    model_dir(tmp_path / role, **({"head": Head.LM if role == "actor" else Head.SCALAR} | change))
    with pytest.raises(SettingsError, match=message):
        made(job(tmp_path))


def test_a_critic_may_start_from_a_language_model(tmp_path: Path) -> None:
    model_dir(tmp_path / "critic", head=Head.LM)
    assert made(job(tmp_path)).specs["critic"].head is Head.SCALAR


def test_a_directory_of_an_unknown_architecture_lists_the_families(tmp_path: Path) -> None:
    path = job(tmp_path)
    config = tmp_path / "actor" / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "mamba"'))
    with pytest.raises(SettingsError, match=r"model_type 'mamba' is not supported, valid: .*llama"):
        made(path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model directory .*nowhere does not exist"):
        made(job(tmp_path), f"models.critic={tmp_path}/nowhere")


@pytest.mark.parametrize("row", ["0,0", "0,"])
def test_a_trace_that_asks_for_zero_devices_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "pool.csv").write_text(f"step,devices\n{row}\n")
    pool = {"devices": 3, "capacity": "1 GiB", "speed": 0.1}
    with pytest.raises(SettingsError, match="zero devices"):
        made(job(tmp_path, cluster={"use": "trace", "path": "pool.csv", "pool": pool}))


def test_a_model_may_be_named_to_plan_with(tmp_path: Path) -> None:
    path = job(tmp_path, models={role: {"name": "llama-3.2-1b"} for role in ("actor", "critic", "reward")}, task=None)
    settings = build.resolve(path)
    assert {role: spec.hidden for role, spec in build.specs(settings).items()} == dict.fromkeys(
        ("actor", "reference", "reward", "critic"), 2048
    )
    assert not build.trainable(settings)
    bad = build.resolve(
        job(tmp_path, models={role: {"name": "llama-9.9-1b"} for role in ("actor", "reward")}, task=None),
        ["algorithm.use=grpo"],
    )
    with pytest.raises(SettingsError, match=r"llama-9\.9-1b"):
        build.specs(bad)
