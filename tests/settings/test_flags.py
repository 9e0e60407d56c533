"""Questions asked by flags: what is missing is asked for, what is assumed is said, what is wrong is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.core import Capabilities, Head, Lengths, SettingsError, Stage
from nereus.integrations.habits import said, used_by
from nereus.settings import flags as by_flags
from nereus.settings.flags import Flags
from nereus.settings.host import Host
from nereus.settings.pins import parse_pin
from tests.controller.world import WORKFLOW
from tests.fakes import TRAINING

GIVEN = Flags(
    algorithm="ppo", model="llama-3.1-8b", cluster="h200x8", nodes=2, prompt="512", response="1000:2500:4000", batch=256
)


def refused(given: Flags, *words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        by_flags.question(given)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_what_is_missing_is_asked_for_with_the_choices() -> None:
    refused(
        Flags(), "--algorithm (grpo, ppo, remax)", "--model", "--cluster", "--nodes", "--prompt", "--response MEAN"[:10]
    )
    refused(replace(GIVEN, response=None), "--response (MEAN[:P95[:MAX]] tokens)")


def test_a_full_question_is_the_problem_that_was_meant() -> None:
    full = replace(GIVEN, samples=2, mini_batch=128, epochs=1, prompt="512:1024", precision="bf16")
    asked = by_flags.question(replace(full, critic_model="llama-3.2-1b", reward_model="llama-3.1-8b"))
    problem = asked.problem
    assert len(problem.cluster.devices) == 16
    assert (problem.workload.sequences, problem.workload.mini_batch, problem.workload.epochs) == (512, 128, 1)
    assert problem.workload.response == Lengths(1000, 2500, 4000)
    assert problem.workload.prompt.maximum == 1024
    assert {role: spec.hidden for role, spec in problem.workflow.specs.items()} == {
        "actor": 4096,
        "reference": 4096,
        "reward": 4096,
        "critic": 2048,
    }
    assert problem.workflow.specs["critic"].head is Head.SCALAR
    assert problem.workflow.specs["actor"].dtype == "bf16"


def test_fp8_is_of_matrix_products_alone_and_generation_may_differ() -> None:
    def precisions(**changed: Any) -> tuple[set[str], set[str]]:
        flow = by_flags.question(replace(GIVEN, **changed)).problem.workflow
        assert {spec.dtype for spec in flow.specs.values()} == {"bf16"}
        generating = {ms for ms in flow.model_stages if ms.stage is Stage.GENERATION}
        rest = set(flow.model_stages) - generating
        return {flow.precision(ms) for ms in generating}, {flow.precision(ms) for ms in rest}

    assert precisions() == ({"bf16"}, {"bf16"})
    assert precisions(precision="fp8") == ({"fp8"}, {"fp8"})
    assert precisions(generation_precision="fp8") == ({"fp8"}, {"bf16"})
    assert precisions(precision="fp8", generation_precision="bf16") == ({"bf16"}, {"fp8"})


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"samples": None}, "--samples"),
        ({"batch": None}, "--batch"),
        ({"mini_batch": None}, "--mini-batch"),
        ({"epochs": None}, "--epochs"),
        ({"precision": None}, "--precision"),
        ({"critic_model": None}, "--critic-model"),
        ({"prompt": "512"}, "--prompt MEAN:MAX"),
        ({"response": "1000:2500"}, "--response MEAN:P95:MAX"),
        ({"response": "1000"}, "--response MEAN:P95:MAX"),
    ],
)
def test_what_is_assumed_is_said_with_the_flag_that_says_it(changed: dict[str, Any], flag: str) -> None:
    every: dict[str, Any] = {"samples": 1, "mini_batch": 64, "epochs": 1, "precision": "bf16", "prompt": "512:512"}
    models: dict[str, Any] = {f"{role}_model": "llama-3.1-8b" for role in ("critic", "reward", "reference")}
    full = replace(GIVEN, **every, **models)
    before = by_flags.question(full).assumptions
    after = by_flags.question(replace(full, **changed)).assumptions
    assert not any(flag in line for line in before)
    assert any(flag in line for line in after)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "lama-3.1-8b"}, ["lama-3.1-8b", "lama-3.1-8B"]),
        ({"cluster": "h200x9"}, ["h200", "1 to 8"]),
        ({"cluster": "h2000x8"}, ["h2000x8", "h200"]),
        ({"algorithm": "popo"}, ["popo", "ppo"]),
        ({"nodes": 0}, ["--nodes 0", "at least 1"]),
        ({"batch": 0}, ["--batch 0", "at least 1"]),
        ({"samples": -1}, ["--samples -1", "at least 1"]),
        ({"mini_batch": 100}, ["mini_batch 100", "256"]),
        ({"prompt": "0"}, ["--prompt '0'", "at least 1"]),
        ({"prompt": "512:100"}, ["must not fall"]),
        ({"prompt": "many"}, ["MEAN[:MAX]"]),
        ({"response": "1:2:3:4"}, ["MEAN[:P95[:MAX]]"]),
        ({"response": "nan"}, ["at least 1"]),
        ({"response": "0.5"}, ["--response '0.5'", "at least 1"]),
        ({"batch": 10**20}, ["at most 4,294,967,296 sequences"]),
        ({"nodes": 10**6}, ["at most 131,072 devices"]),
        ({"model": "x" * 5000}, ["is unknown"]),
        ({"algorithm": "../ppo"}, ["cannot load '../ppo'"]),
        ({"response": "1000:2500:200000"}, ["200,000", "131,072 positions"]),
        ({"precision": "int8"}, ["int8", "bf16, fp16, fp32, fp8"]),
        ({"precision": "fp8", "cluster": "a100-80x8"}, ["fp8: a100-80 computes in bf16"]),
        ({"generation_precision": "fp16"}, ["--generation-precision 'fp16'", "bf16, fp8"]),
        ({"precision": "fp16", "generation_precision": "fp8"}, ["--generation-precision fp8 goes with", "fp16"]),
        ({"algorithm": "grpo", "critic_model": "llama-3.1-8b"}, ["grpo has no critic"]),
        ({"verifier": True, "reward_model": "llama-3.1-8b"}, ["--verifier", "--reward-model"]),
        ({"reward_model": "llama-2-7b"}, ["vocabulary of 32000", "128256"]),
    ],
)
def test_bad_values_are_refused_with_what_is_valid(changed: dict[str, Any], words: list[str]) -> None:
    refused(replace(GIVEN, **changed), *words)


def test_a_directory_needs_no_weights_but_every_size(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = replace(GIVEN, model=str(tmp_path), response="10:20:30")
    assert by_flags.question(given).problem.workflow.specs["actor"].layers == 4
    del config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(given, "num_hidden_layers", "missing")
    refused(replace(given, model=str(tmp_path / "none")), "config.json is missing")


def test_open_tails_lie_beyond_what_was_said() -> None:
    mean = by_flags.question(replace(GIVEN, response="1000")).problem.workload.response
    tail = by_flags.question(replace(GIVEN, response="1000:2000")).problem.workload.response
    assert mean.p95 == pytest.approx(1000 * math.log(20))
    assert 2000 < tail.maximum < 131_072 - 512
    assert tail.p95 == 2000


def test_host_flags_become_capabilities() -> None:
    given = Host(recompute="full,none", zero="1", cp="2,4", vpp="2", offload=True, even_shares=True)
    able = replace(Capabilities(), **given.capabilities())  # type: ignore[arg-type]
    assert (able.recompute, able.zero, able.cp, able.vpp) == (("none", "full"), (1,), (1, 2, 4), (1, 2))
    assert (able.offload, able.uneven_shares, able.sequence_parallel) == (True, False, False)
    assert Host().capabilities() == {}


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (Host(recompute="half"), "'half', valid: none, selective, full"),
        (Host(zero="4"), "'4', valid: 0, 1, 2, 3"),
        (Host(cp="0"), "at least 1"),
        (Host(dp="odd"), "'odd', valid: any, powers"),
    ],
)
def test_unknown_techniques_are_refused(host: Host, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        host.capabilities()


def test_pins_stay_inside_what_the_host_runs() -> None:
    """FSDP cuts no model: other pins leave it so, and none may say otherwise."""
    asked = by_flags.question(GIVEN, Host(made_for="verl"))
    pinned = asked.pinned(("actor/training=mb1",)).problem.capabilities.pin(TRAINING)
    assert (pinned.tp, pinned.pp, pinned.micro_batch) == (1, 1, 1)
    with pytest.raises(SettingsError, match=r"--pin actor/training: pp 2, valid: pp 1"):
        asked.pinned(("actor/training=pp2",))


def test_a_plan_for_a_framework_is_on_machines_as_it_uses_them() -> None:
    """The same seconds as of its own configuration."""
    any_host, nemo_rl = (by_flags.question(GIVEN, Host(made_for=name)) for name in (None, "nemo-rl"))
    assert nemo_rl.problem.cluster == used_by("nemo-rl", any_host.problem.cluster) != any_host.problem.cluster
    assert set(said("nemo-rl")) <= set(nemo_rl.assumptions)


def test_pins_are_read_from_a_flag() -> None:
    model_stage, pin = parse_pin("actor/training=tp4,pp=2, dp8,mb1", WORKFLOW)
    assert model_stage == TRAINING
    assert (pin.tp, pin.pp, pin.dp, pin.micro_batch) == (4, 2, 8, 1)


@pytest.mark.parametrize(
    "text", ["actor/training", "actor/training=", "actor/training=tp4,xx2", "actor/training=tp2,tp4"]
)
def test_other_pins_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--pin"):
        parse_pin(text, WORKFLOW)


def test_a_pin_of_no_model_stage_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'actor/training'"):
        parse_pin("actor/trainin=tp2", WORKFLOW)
