"""How many published launch configurations are imported, how many of them exactly, and why the others are refused.

`python -m benchmarks.planner.imports --data DIR [--sources DIR]`. A row counts where its model and its devices are
named; it is imported exactly when every degree, device count and batch size equals its columns. By default the rows'
resolved overrides and YAML parts are read; with `--sources`, the original files (one folder `OWNER+NAME` a repository).
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._result import Result, at_least
from nereus.core import NereusError
from nereus.integrations import FRAMEWORKS, Imported, RefusedImportError, job, read, read_text
from nereus.integrations.stated import stated

DEGREES = tuple(f"{role}_{axis}" for role in ("actor", "ref", "critic") for axis in ("tp", "pp", "sp"))
COMPARED = (
    *DEGREES,
    *("actor_cp", "actor_ep", "fsdp_size", "rollout_tp", "rollout_dp", "rollout_pp", "rollout_ep"),
    *("nnodes", "gpus_per_node", "total_gpus", "placement", "rollout_nnodes", "rollout_gpus"),
    *("train_batch_size", "rollout_n", "mini_batch_size", "micro_batch_per_gpu"),
)
"""Degrees, devices and batch."""
NOTED = ("max_prompt_len", "max_response_len", "max_seq_len", "gpu_memory_utilization", "max_tokens_per_gpu")
"""Compared too, and reported, but not asked for."""
MACHINE = "h200x8"


@dataclass(slots=True)
class Count:
    """What happened to the rows of one framework."""

    rows: int = 0
    absent: int = 0
    imported: int = 0
    exact: int = 0
    problems: int = 0
    """Imported rows of known models that become a planning problem."""
    plans: int = 0
    """Of these, with a plan of their own."""
    refused: Counter[str] = field(default_factory=Counter)
    unknown_models: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)


def run(data: Path, sources: Path | None = None) -> list[Result]:
    """The share of rows imported exactly, per framework and over all."""
    folder = data / "rl-configs"
    with (folder / "rl_configs.csv").open(encoding="utf-8", newline="") as file:
        columns = {(row["repo"], row["path"]): row for row in csv.DictReader(file)}
    counts = {framework: Count() for framework in FRAMEWORKS}
    for record in _records(folder):
        row = columns[record["repo"], record["path"]]
        if row["model"] and row["total_gpus"]:
            framework = "verl" if record["framework"].startswith("verl") else record["framework"]
            _take(counts[framework], framework, record, row, sources)
    return [*(_result(framework, count) for framework, count in counts.items()), _total(counts.values())]


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    for name in ("cli_overrides.jsonl", "yaml_configs.jsonl"):
        with (folder / name).open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def _take(
    count: Count, framework: str, record: Mapping[str, Any], row: Mapping[str, str], sources: Path | None
) -> None:
    count.rows += 1
    try:
        found = _read(framework, record, sources)
    except RefusedImportError as error:
        count.refused[error.reason.value] += 1
        return
    if found is None:
        count.absent += 1
        return
    count.imported += 1
    own = stated(found)
    wrong = [name for name in (*COMPARED, *NOTED) if not _equal(row[name], own[name])]
    count.mismatches.update(wrong)
    count.exact += not set(wrong) & set(COMPARED)
    _plan(count, found, row["model"])


def _read(framework: str, record: Mapping[str, Any], sources: Path | None) -> Imported | None:
    if sources is None:
        kept = record.get("overrides") or record["config"]
        return read_text(framework, json.dumps(kept), f"{Path(record['path']).stem}.json")
    path = sources / record["repo"].replace("/", "+") / record["path"]
    return read(framework, path) if path.exists() else None


def _plan(count: Count, found: Imported, model: str) -> None:
    try:
        sizes = job.specs(found, {role: model for role in found.roles})
    except NereusError:
        count.unknown_models[model] += 1
        return
    try:
        made = job.build(found, job.pool(found, MACHINE), sizes)
    except NereusError as error:
        count.refused[f"no problem: {str(error).partition(':')[0][:40]}"] += 1
        return
    count.problems += 1
    count.plans += made.plan is not None


def _equal(column: str, own: object) -> bool:
    """Whether a column that is not empty says the same."""
    if column in ("", "null", "None"):
        return True
    try:
        return own is not None and float(column) == float(str(own))
    except ValueError:
        return column.lower() == str(own).lower()


def _result(framework: str, count: Count) -> Result:
    read_rows = count.rows - count.absent
    share = 100 * count.exact / read_rows if read_rows else 0.0
    return Result(f"imports of {framework}, exact %", "report", share, notes=_notes(count), details=_details(count))


def _total(counts: Any) -> Result:
    total = Count()
    for count in counts:
        for name in ("rows", "absent", "imported", "exact", "problems", "plans"):
            setattr(total, name, getattr(total, name) + getattr(count, name))
        for name in ("refused", "unknown_models", "mismatches"):
            getattr(total, name).update(getattr(count, name))
    share = 100 * total.exact / max(total.rows - total.absent, 1)
    return at_least("imports, exact %", 85, share, notes=_notes(total), details=_details(total))


def _notes(count: Count) -> str:
    parts = [f"{count.exact} of {count.rows - count.absent} exact, {count.imported} imported"]
    parts.append(f"{count.problems} planned, {count.plans} with their own plan")
    if count.refused:
        parts.append("refused " + ", ".join(f"{reason} {number}" for reason, number in count.refused.most_common()))
    if count.mismatches:
        parts.append("unequal " + ", ".join(f"{name} {number}" for name, number in count.mismatches.most_common()))
    return "; ".join(parts)


def _details(count: Count) -> dict[str, Any]:
    names = ("rows", "absent", "imported", "exact", "problems", "plans", "refused", "unknown_models", "mismatches")
    return {name: getattr(count, name) for name in names}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sources", type=Path)
    asked = parser.parse_args()
    for result in run(asked.data, asked.sources):
        print(f"{result.name}: {result.measured:.1f} ({result.target}) {result.notes}")


if __name__ == "__main__":
    main()
