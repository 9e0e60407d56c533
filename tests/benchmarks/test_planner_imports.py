from __future__ import annotations

import csv
import json
from pathlib import Path

from benchmarks.planner import imports

from nereus.integrations import FRAMEWORKS

OVERRIDES = {"data.train_batch_size": "64", "trainer.nnodes": "2", "actor_rollout_ref.rollout.n": "4"}
COLUMNS = (*imports.COMPARED, *imports.NOTED, "framework", "repo", "path", "model")


def folder(tmp_path: Path, rows: list[dict[str, str]]) -> Path:
    data = tmp_path / "rl-configs"
    data.mkdir()
    with (data / "rl_configs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    records = [{k: row[k] for k in ("framework", "repo", "path")} | {"overrides": OVERRIDES} for row in rows]
    (data / "cli_overrides.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (data / "yaml_configs.jsonl").write_text("")
    return tmp_path


def test_a_row_counts_where_its_columns_are_equal(tmp_path: Path) -> None:
    base = {"framework": "verl", "repo": "a/b", "model": "Qwen/Qwen2.5-7B", "total_gpus": "16", "nnodes": "2"}
    rows = [
        base | {"path": "right.sh", "train_batch_size": "64", "rollout_n": "4", "actor_tp": ""},
        base | {"path": "wrong.sh", "train_batch_size": "32"},
        base | {"path": "unnamed.sh", "model": ""},
    ]
    *parts, total = imports.run(folder(tmp_path, rows))
    assert (total.details["rows"], total.details["imported"], total.details["exact"]) == (2, 2, 1)
    assert total.details["mismatches"] == {"train_batch_size": 1}
    assert (total.measured, total.met) == (50.0, False)
    assert [part.name.split()[2].rstrip(",") for part in parts] == list(FRAMEWORKS)


def test_refusals_are_counted_by_reason(tmp_path: Path) -> None:
    row = {"framework": "slime", "repo": "a/b", "path": "x.sh", "model": "m", "total_gpus": "8"}
    total = imports.run(folder(tmp_path, [row]))[-1]
    assert total.details["refused"] == {"foreign": 1}
