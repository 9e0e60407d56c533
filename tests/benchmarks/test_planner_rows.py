"""Published steps become candidates and plans; what cannot be priced is counted by reason."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from benchmarks.planner import rl_rows, rows

LINE = {
    "release": "1.0 Container", "kind": "Pre-Training Performance", "model": "LLAMA3_70B", "system": "DGX-H100",
    "precision": "FP8", "gpus": "64", "global_batch": "128", "micro_batch": "1", "seq_len": "8192", "fsdp": "0",
    "tp": "4", "pp": "8", "cp": "1", "vp": "5", "ep": "n/a", "tokens_per_s_per_gpu": "1024",
}  # fmt: skip
JOB = {
    "system": "GB200 BF16 Benchmarks", "algorithm": "GRPO", "model": "DeepSeek V3", "policy": "On policy",
    "train_max_seq": "1536", "gen_avg_seq": "700", "gpus": "128", "gen_gbs": "512", "train_gbs": "512",
    "gen_tp_pp": "[32,1]", "train_tp_cp_ep_pp_vpp": "[1,1,16,8,n/a]", "step_time_s": "100",
}  # fmt: skip


def written(folder: Path, name: str, lines: list[dict[str, str]]) -> Path:
    (folder / "measured").mkdir(exist_ok=True)
    with (folder / "measured" / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return folder


def test_a_line_becomes_a_candidate_with_the_seconds_of_its_step(tmp_path: Path) -> None:
    data = written(tmp_path, "megatron_bridge_training_throughput.csv", [LINE])
    (row,) = rows.bridge(data).rows
    candidate = row.candidate
    assert (candidate.layout.tp, candidate.layout.pp, candidate.dp, candidate.vpp, candidate.ep) == (4, 8, 2, 5, 1)
    assert (row.precision, candidate.sequence_parallel, candidate.zero) == ("fp8", True, 1)
    assert row.seconds == 128 * 8192 / (1024 * 64)
    assert 1 < rows.predict(row) < 100


def test_what_is_not_named_is_counted_by_reason(tmp_path: Path) -> None:
    changes = [
        {"model": "Other"},
        {"system": "DGX-GB300"},
        {"precision": "NVFP4"},
        {"kind": "LoRA Performance"},
        {"gpus": "63"},
    ]
    data = written(tmp_path, "megatron_bridge_training_throughput.csv", [LINE | change for change in changes])
    table = rows.bridge(data)
    assert not table.rows
    assert sorted(table.excluded) == [
        "LoRA: weights are not trained",
        "degrees do not multiply to the devices",
        "device not named: DGX-GB300",
        "family not named: Other",
        "precision not bf16 or fp8: NVFP4",
    ]


def test_an_rl_job_is_priced_call_by_call(tmp_path: Path) -> None:
    asynchronous = JOB | {"policy": "1-step Off"}
    (job,), excluded = rl_rows.read(written(tmp_path, "nemo_rl_step_time.csv", [JOB, asynchronous]))
    assert sum(excluded.values()) == 1
    assert {a.candidate.devices for a in job.plan.assignments} == {128}
    calls = job.model.call_s(job.plan)
    assert set(calls) == {"generate", "reference_log_probs", "old_log_probs", "update_actor", "sync"}
    assert job.predict() == pytest.approx(sum(calls.values()))


def test_an_rl_job_takes_other_rates_to_host_memory(tmp_path: Path) -> None:
    """What its update moves there and back takes half of the time at twice the rate."""
    table = written(tmp_path, "nemo_rl_step_time.csv", [JOB])
    seconds = [
        job.model.call_s(job.plan)["update_actor"] for rate in (1e9, 2e9, 4e9) for job in rl_rows.read(table, rate)[0]
    ]
    assert seconds[0] - seconds[1] == pytest.approx(2 * (seconds[1] - seconds[2]))
    assert seconds[1] > seconds[2]


def test_only_pairs_that_lie_apart_have_an_order() -> None:
    measured, predicted = np.array([1.0, 1.1, 2.0, 4.0]), np.array([1.0, 0.5, 3.0, 2.0])
    assert rows.ordered(measured, predicted, "aaaa") == (4, 5)
    assert rows.ordered(measured, predicted, "aabb") == (0, 1)
