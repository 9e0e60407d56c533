"""`nereus plan` by flags and from another framework's configuration, and what becomes of its answer."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.command import Answer, Command
from tests.settings.files import model_dir

POOL = {
    "nodes": 1,
    "devices_per_node": 2,
    "kind": {"name": "small", "memory": "64 MiB", "peak_flops": {"bf16": 1e11, "fp32": 5e10}, "memory_rate": "4 GB/s"},
    "links": {"intra": {"rate": "1 GB/s", "latency_s": 1e-4}, "inter": {"rate": "1 GB/s", "latency_s": 1e-4}},
}


@pytest.fixture
def flags(tmp_path: Path) -> list[object]:
    """A small GRPO job on two small devices."""
    model_dir(tmp_path / "tiny")
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(POOL))
    job = {"model": tmp_path / "tiny", "cluster": tmp_path / "pool.yaml", "algorithm": "grpo"}
    work = {"prompt": 8, "response": "10:20:30", "batch": 4, "samples": 2, "mini-batch": 8, "epochs": 1}
    return [text for name, value in (job | work).items() for text in (f"--{name}", value)] + ["--verifier"]


def refused(answer: Answer, code: int, *words: str) -> None:
    assert (answer.code, answer.out) == (code, ""), answer
    assert answer.err.count("nereus: ") == 1
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err.replace("\n", " "), answer.err


def test_flags_alone_give_a_plan_with_its_assumptions(nereus: Command, flags: list[object]) -> None:
    answer = nereus("plan", *flags)
    assert (answer.code, answer.err) == (0, "")
    assert "assumed: bf16" in answer.out
    assert "padded to the longest" in answer.out
    assert "any number of replicas" in answer.out
    assert "any number of replicas" not in nereus("plan", *flags, "--dp", "powers").out
    for model_stage in ("actor/generation", "reference/inference", "actor/training"):
        assert model_stage in answer.out
    assert "reward" not in answer.out.partition("refused")[0].partition("assumed: hosts")[2]


def test_json_page_and_export_agree(nereus: Command, flags: list[object], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    answer = nereus("plan", *flags, "--json", "--html", page, "--top", 2)
    data = json.loads(answer.out)
    assert data["fits"]
    assert len(data["runners_up"]) <= 1
    assert {stage["model_stage"] for stage in data["model_stages"]} == {
        "actor/generation",
        "reference/inference",
        "actor/training",
    }
    assert max(call["end_s"] for call in data["calls"]) == pytest.approx(data["step_s"])
    assert all(call["call"] in page.read_text() for call in data["calls"])
    saved = tmp_path / "plan.json"
    saved.write_text(answer.out)
    training = next(stage for stage in data["model_stages"] if stage["model_stage"] == "actor/training")
    exported = nereus("export", "megatron", saved)
    assert exported.code == 0
    assert f"--tensor-model-parallel-size {training['tp']}" in exported.out


def test_padding_is_assumed_aloud_until_it_is_said(nereus: Command, flags: list[object]) -> None:
    by_default, padded, packed = (
        nereus("plan", *flags, "--no-advice", *more) for more in ([], ["--padded"], ["--packed"])
    )
    assert "padded to the longest of them (--packed, --padded)" in by_default.out
    assert "padded to" not in padded.out + packed.out
    assert by_default.out.partition("predicted")[2] == padded.out.partition("predicted")[2]
    (slow, fast) = (json.loads(nereus("plan", *flags, "--json", how).out)["step_s"] for how in ("--padded", "--packed"))
    assert fast < slow


@pytest.mark.parametrize(
    ("host", "framework"),
    [("verl", "verl"), ("verl:megatron", "verl"), ("openrlhf", "openrlhf"), ("slime", "megatron")],
)
def test_a_plan_for_a_framework_can_be_exported_to_it(
    nereus: Command, flags: list[object], tmp_path: Path, host: str, framework: str
) -> None:
    answer = nereus("plan", *flags, "--json", "--for", host)
    data = json.loads(answer.out)
    assert len({stage["devices"] for stage in data["model_stages"]}) == 1
    assert any("all roles take turns" in line for line in data["assumptions"])
    saved = tmp_path / "plan.json"
    saved.write_text(answer.out)
    assert nereus("export", framework, saved).code == 0


def test_frameworks_that_are_unknown_or_already_named(nereus: Command, flags: list[object], tmp_path: Path) -> None:
    refused(nereus("plan", *flags, "--for", "ver"), 2, "'ver'", "did you mean 'verl'")
    refused(nereus("plan", *flags, "--for", "verl:zero"), 2, "fsdp or megatron", "'zero'")
    refused(nereus("plan", *flags, "--for", "verl:megatron", "--zero", "3"), 2, "--zero 3", "can do 0, 1")
    refused(nereus("plan", *flags, "--for", "openrlhf", "--recompute", "full,selective"), 2, "selective", "none, full")
    refused(nereus("plan", *flags, "--for", "verl", "--vpp", "1,2"), 2, "--vpp 2", "can do 1")
    job = tmp_path / "job.yaml"
    job.write_text("algorithm: grpo")
    refused(nereus("plan", job, "--for", "verl"), 2, "--for verl", "job.yaml")
    refused(nereus("plan", job, "--padded"), 2, "--packed")


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    nereus: Command, flags: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "plan.html"
    page.write_text("old")

    def full(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(text.encode()[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    refused(nereus("plan", *flags, "--no-advice", "--html", page), 2, "--html", "No space left")
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.glob("*plan.html*")] == ["plan.html"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "| head -c 1"])
def test_nobody_reads_what_is_printed(closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -c 'from nereus.cli import main; main()' list algorithms {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Error" not in done.stderr, done.stderr


def test_pinned_degrees_get_a_verdict(nereus: Command, flags: list[object]) -> None:
    answer = nereus("plan", *flags, "--json", "--pin", "actor/training=tp1,pp1,dp1")
    found = json.loads(answer.out)["comparison"]
    assert (found["own"], found["fits"]) == ("pinned degrees", True)
    assert found["slower"] >= 0
    text = nereus("plan", *flags, "--pin", "actor/training=tp1,pp1,dp1").out
    assert "pinned degrees: fits" in text
    assert "plan with the pins" in text


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--pin", "actor/training=tp3"], 2, ["4 heads", "1, 2"]),
        (["--pin", "actor/training=tp2,pp2"], 2, ["needs 4 devices", "2"]),
        (["--pin", "actor/trainin=tp2"], 2, ["did you mean 'actor/training'"]),
        (["--devices", 3], 2, ["3 devices", "1 to 2"]),
        (["--top", 0], 2, ["--top 0", "at least 1"]),
        (["--set", "run.steps=1"], 2, ["--set changes a job file"]),
        (["--var", "A=1"], 2, ["--from"]),
        (["--response", "100:110:121"], 2, ["121", "128 positions"]),
        (["--zero", "7"], 2, ["--zero '7'"]),
        (["--html", "none/there.html"], 2, ["none/there.html"]),
    ],
)
def test_bad_flags_are_refused(
    nereus: Command, flags: list[object], more: list[object], code: int, words: list[str]
) -> None:
    refused(nereus("plan", *flags, *more), code, *words)


def test_no_flags_at_all_says_what_is_needed(nereus: Command) -> None:
    refused(nereus("plan"), 2, "--algorithm (grpo, ppo, remax)", "--model", "--cluster", "--prompt", "--response")


def test_a_job_file_and_flags_exclude_each_other(nereus: Command, tmp_path: Path) -> None:
    refused(nereus("plan", tmp_path / "job.yaml", "--model", "llama-3.1-8b"), 2, "job.yaml", "--model", "--set")


def test_what_does_not_fit_is_exit_3_with_advice(nereus: Command, flags: list[object], tmp_path: Path) -> None:
    small = POOL | {"kind": {**POOL["kind"], "memory": "1 MiB"}}  # type: ignore[dict-item]
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(small))
    answer = nereus("plan", *flags, "--advice")
    refused(answer, 3, "what would help:", "devices with", "instead of 1 MiB")
    data = json.loads(nereus("plan", *flags, "--advice", "--json").out)
    assert not data["fits"]
    assert "bytes short" in data["shortage"]
    assert {"kind", "change", "step_s", "text"} <= set(data["advice"][0])


SCRIPT = """
NODES=1
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_batch_size=8 data.max_prompt_length=16 data.max_response_length=32 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.n=2 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 actor_rollout_ref.rollout.name=vllm \\
    trainer.n_gpus_per_node=2 trainer.nnodes=$NODES
"""


def test_a_launch_script_gets_a_verdict_beside_the_best_plan(nereus: Command, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    answer = nereus("plan", "--from", "verl", script, "--cluster", "h200", "--json")
    assert answer.code == 0, answer
    data = json.loads(answer.out)
    assert data["comparison"]["own"] == "imported configuration"
    assert data["comparison"]["fits"]
    assert data["cluster"]["devices"] == 2
    assert any("verl's default" in line for line in data["assumptions"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "ver", "run.sh"], ["did you mean 'verl'"]),
        (["--from", "verl"], ["needs the FILE"]),
        (["--from", "verl", "run.sh"], ["--cluster", "h200x8"]),
        (["--from", "verl", "run.sh", "--cluster", "h200", "--batch", 8], ["--batch", "run.sh says it"]),
        (["--from", "verl", "none.sh", "--cluster", "h200"], ["none.sh"]),
        (["--from", "verl", "bad.sh", "--cluster", "h200"], ["bad.sh", "line 3"]),
        (["--from", "verl", "run.sh", "--cluster", "h200", "--response", "x"], ["MEAN[:P95[:MAX]]"]),
        (["--from", "verl", "nameless.sh", "--cluster", "h200"], ["names no model", "--model NAME|DIR"]),
        (["--from", "verl", "run.sh", "--cluster", "h200", "--var", "NODES"], ["--var 'NODES'", "NAME=VALUE"]),
    ],
)
def test_bad_imports_are_refused(nereus: Command, arguments: list[object], words: list[str]) -> None:
    Path("run.sh").write_text(SCRIPT)
    Path("bad.sh").write_text("A=1\npython3 -m verl.trainer.main_ppo a=b\nfor x in (1 2\n")
    Path("nameless.sh").write_text(SCRIPT.replace("actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct", ""))
    refused(nereus("plan", *arguments), 2, *words)


def test_exports_refuse_what_is_no_plan(nereus: Command, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    refused(nereus("export", "verl", path), 2, "not an answer of `nereus plan --json`")
    refused(nereus("export", "verl", tmp_path / "none.json"), 2, "none.json")


@pytest.mark.parametrize(("kind", "names"), [("models", {"meta-llama/Llama-3.1-8B"}), ("clusters", {"h200x8", "file"})])
def test_models_and_machines_are_listed(nereus: Command, kind: str, names: set[str]) -> None:
    found = json.loads(nereus("list", kind, "--json").out)
    assert names <= set(found)
    assert all(entry["about"] for entry in found.values())


def test_calibration_refuses_what_it_cannot_write(nereus: Command, tmp_path: Path) -> None:
    refused(nereus("calibrate", tmp_path / "none" / "here.yaml"), 2, "there is no directory")
    refused(nereus("calibrate", tmp_path / "here.yaml", "--devices", 0), 2, "--devices 0")
    refused(nereus("calibrate", tmp_path), 2, "is a directory")


def test_list_names_its_choices_and_the_version_is_told(nereus: Command) -> None:
    refused(nereus("list"), 2, "models", "algorithms", "clusters")
    assert nereus("--version").out.startswith("nereus ")
