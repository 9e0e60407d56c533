"""Predicted against published step times of training and RL jobs on named machines: Megatron-Bridge and NeMo RL.

Only constants of devices and links stand between a row and its prediction. Five of them, which no table of operations
gives, were fitted to the Megatron-Bridge rows themselves; `fit_rows` says how far configurations left out are missed.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks._result import Result, at_least, at_most
from benchmarks.planner import rl_rows
from nereus.clusters.named import machine
from nereus.core import Call, Candidate, Layout, Lengths, ModelSpec, ModelStage, Stage, Work, Workflow, Workload
from nereus.cost.rows import Rows
from nereus.cost.step import StepModel
from nereus.families.models import named

MODELS = {
    "LLAMA3_8B": "Llama-3-8B",
    "LLAMA3_70B": "Llama-3-70B",
    "LLAMA3.1_405B": "Llama-3.1-405B",
    "Qwen3_30B_a3B": "Qwen3-30B-A3B",
    "Qwen3_235B_a22B": "Qwen3-235B-A22B",
    "DeepSeekV3": "DeepSeek-V3",
    "Kimi_K2": "Kimi-K2",
    "GPT OSS 120B": "gpt-oss-120b",
    "DeepSeek V3": "DeepSeek-V3",
    "Qwen3-235B": "Qwen3-235B-A22B",
    "Qwen3-30B3A": "Qwen3-30B-A3B",
}
MACHINES = {"DGX-H100": "h100", "DGX-H200": "h200", "DGX-B200": "b200", "DGX-GB200": "gb200"}
SCALED = {"DGX-B300": "b300", "DGX-GB300": "gb300"}
"""Types that are others scaled by their specification: nothing is fitted to their rows, which are counted apart."""
HOST_BYTES_PER_S = (2.1e9, 5e9)
"""To host memory and back, the ends of what is published of NeMo RL (integrations/habits.py takes the first to it)."""
PRECISIONS = {"BF16": "bf16", "FP8": "fp8", "FP8-CS": "fp8", "FP8-MX": "fp8", "MXFP8": "fp8"}
NOTES = (" (w/o MTP)", " (dropless)", " (tokendrop)")
"""What a table adds to a model's name; the shapes stay those of the model."""
Floats = NDArray[np.float64]
APART = 0.15
"""Pairs whose step times are closer than this have no right order."""
LIMIT = 15
"""Median error in % that each table's rows must not exceed."""
ACTOR = ModelStage("actor", Stage.TRAINING)


@dataclass(frozen=True, slots=True)
class Row:
    """One published run: `seconds` of a step of `batch` sequences of `length` tokens."""

    model: str
    machine: str
    precision: str
    candidate: Candidate
    batch: int
    length: int
    seconds: float
    release: str

    @property
    def label(self) -> str:
        """One line."""
        c = self.candidate
        degrees = f"tp{c.layout.tp} pp{c.layout.pp} cp{c.cp} vp{c.vpp} ep{c.ep} dp{c.dp} mb{c.micro_batch}"
        return f"{self.model} {self.machine} x{c.devices} {self.precision} {degrees}{' fsdp' * (c.zero == 3)}"


@dataclass(slots=True)
class Table:
    """The rows that can be priced, and how many others could not be, by reason."""

    rows: list[Row] = field(default_factory=list)
    excluded: Counter[str] = field(default_factory=Counter)


def bridge(data: Path, machines: Mapping[str, str] = MACHINES) -> Table:
    """Megatron-Bridge's training runs; a line counts as one of another release, not as another configuration."""
    table = Table()
    for line in _lines(data / "measured" / "megatron_bridge_training_throughput.csv"):
        reason, model = _unusable(line, machines), _model(line["model"])
        if reason:
            table.excluded[reason] += 1
            continue
        devices, batch, length = (int(line[name]) for name in ("gpus", "global_batch", "seq_len"))
        candidate = _candidate(line, devices)
        if candidate is None:
            table.excluded["degrees do not multiply to the devices"] += 1
            continue
        seconds = batch * length / (float(line["tokens_per_s_per_gpu"]) * devices)
        key = machines[line["system"]], PRECISIONS[line["precision"].strip()]
        table.rows.append(Row(model, *key, candidate, batch, length, seconds, line["release"].split()[0]))
    return table


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _model(name: str) -> str:
    for note in NOTES:
        name = name.removesuffix(note)
    return MODELS.get(name, "")


def _unusable(line: Mapping[str, str], machines: Mapping[str, str]) -> str:
    """Why a row is not one that we claim to predict; empty when it is."""
    if not _model(line["model"]):
        return f"family not named: {line['model']}"
    if line["system"] not in machines:
        return f"device not named: {line['system']}"
    if line["precision"].strip() not in PRECISIONS:
        return f"precision not bf16 or fp8: {line['precision']}"
    if line["kind"].startswith("LoRA"):
        return "LoRA: weights are not trained"
    return ""


def _candidate(line: Mapping[str, str], devices: int) -> Candidate | None:
    """Megatron's defaults where a table is silent: sequence parallelism with tp, a sharded optimizer, no recompute."""
    tp, pp, cp, vpp, ep = (_degree(line[name]) for name in ("tp", "pp", "cp", "vp", "ep"))
    if devices % (tp * pp * cp):
        return None
    return Candidate(
        ACTOR,
        Layout(tp, pp),
        dp=devices // (tp * pp * cp),
        micro_batch=int(line["micro_batch"]),
        zero=3 if _degree(line["fsdp"], 0) > 1 else 1,
        cp=cp,
        ep=ep,
        vpp=vpp,
        sequence_parallel=tp > 1,
    )


def _degree(text: str, default: int = 1) -> int:
    return int(text) if text.strip().isdigit() else default


def predict(row: Row) -> float:
    """Seconds of the step in the model."""
    model = model_of(row)
    return float(model.price(ACTOR, columns(row), tuple(model.cluster.kinds), row.precision).call_s["update"][0])


def model_of(row: Row) -> StepModel:
    """A step that is one update of the row's model."""
    spec = named(row.model)
    workflow = Workflow((Call("update", ACTOR, Work.UPDATE, reads=("tokens",)),), {"actor": spec})
    lengths = Lengths.constant(0), Lengths.constant(row.length)
    workload = Workload(row.batch, 1, *lengths, mini_batch=row.batch, max_response_tokens=row.length)
    return StepModel(workflow, workload, machine(row.machine))


def columns(row: Row) -> Rows:
    """The row as a candidate packed into nodes."""
    spec: ModelSpec = named(row.model)
    node = len(machine(row.machine).ids)
    return Rows.of([row.candidate], spec.layers, node)


def ordered(measured: Floats, predicted: Floats, groups: Sequence[object]) -> tuple[int, int]:
    """Of the pairs of one group whose measured values lie apart: how many are predicted in the right order, and all."""
    right = pairs = 0
    for i, j in combinations(range(len(measured)), 2):
        if groups[i] != groups[j] or abs(np.log(measured[i] / measured[j])) <= np.log1p(APART):
            continue
        pairs += 1
        right += (measured[i] > measured[j]) == (predicted[i] > predicted[j])
    return right, pairs


def run(data: Path) -> list[Result]:
    """The part's lines of the benchmark table."""
    table, (jobs, excluded) = bridge(data), rl_rows.read(data)
    measured = np.array([row.seconds for row in table.rows])
    predicted = np.array([predict(row) for row in table.rows])
    job_ratios = np.array([job.predict() / job.seconds for job in jobs])
    ratios = np.concatenate([predicted / measured, job_ratios])
    per_token = np.array([row.candidate.devices / (row.batch * row.length) for row in table.rows])
    apart = measured * per_token, predicted * per_token
    right, pairs = ordered(*apart, [0] * len(measured))
    own_right, own_pairs = ordered(*apart, [row.model for row in table.rows])
    details = {
        "excluded": dict(table.excluded + excluded),
        "rows": [[row.label, row.release, row.seconds, float(s)] for row, s in zip(table.rows, predicted, strict=True)],
        "jobs": [rl_rows.describe(job) for job in jobs],
        "by": {name: _split(table.rows, predicted / measured, key) for name, key in SPLITS.items()},
    }
    jobs_counted = (
        f"{len(jobs)} rows, not fitted to, but its rate to host memory is in part assumed; {excluded.total()} excluded"
    )
    return [
        at_most(
            "Megatron-Bridge steps, median error %",
            LIMIT,
            _error(predicted / measured),
            notes=f"{len(measured)} rows, fitted to; {table.excluded.total()} excluded",
            details=details,
        ),
        at_most("NeMo RL steps, median error %", LIMIT, _error(job_ratios), notes=jobs_counted),
        _open_rate(data),
        Result("  both together", "report", _error(ratios), notes=f"{len(ratios)} rows"),
        at_least("Megatron-Bridge, pairs > 15 % apart in order, %", 90, 100 * right / pairs, notes=f"{pairs} pairs"),
        Result("  of one model", "report", 100 * own_right / own_pairs, notes=f"{own_pairs} pairs"),
        _scaled(data),
        _doubled(jobs),
    ]


def _open_rate(data: Path) -> Result:
    """The same rows over the rates to host memory that what is published of the framework leaves open."""
    errors = {}
    for rate in HOST_BYTES_PER_S:
        jobs, _ = rl_rows.read(data, rate)
        errors[f"{rate / 1e9:g} GB/s"] = _error(np.array([job.predict() / job.seconds for job in jobs]))
    return Result(
        "  over the open rates to host memory, largest median error %",
        "report",
        max(errors.values()),
        notes=", ".join(f"{rate}: {error:.1f}" for rate, error in errors.items()),
        details={"by rate": errors},
    )


def _scaled(data: Path) -> Result:
    """Rows of machines about which only specifications are known."""
    rows = bridge(data, SCALED).rows
    ratios = np.array([predict(row) / row.seconds for row in rows])
    by_release = _split(rows, ratios, lambda row: row.release)
    return Result(
        "  on B300 and GB300 by specification, median error %",
        "report",
        _error(ratios),
        notes=f"{len(rows)} rows, nothing fitted to; median ratio {np.median(ratios):.2f}",
        details={
            "by release": by_release,
            "rows": [[r.label, r.release, float(q)] for r, q in zip(rows, ratios, strict=True)],
        },
    )


def _error(ratios: Floats) -> float:
    return float(np.median(100 * np.abs(ratios - 1)))


def _doubled(jobs: Sequence[rl_rows.RLRow]) -> Result:
    """The published job for which twice the devices hardly helped: nearer to no gain (1) than to all of it (0.5)."""
    small, large = (next(job for job in jobs if f"DeepSeek V3 GB200 x{n}" in job.label) for n in (128, 256))
    kept = large.predict() / small.predict()
    return Result(
        "DeepSeek-V3 GRPO, step on 256 / on 128 GB200",
        ">= 0.75",
        kept,
        met=kept >= 0.75,
        notes=f"measured {large.seconds / small.seconds:.3f}",
    )


SPLITS: Mapping[str, Callable[[Row], str]] = {
    "model": lambda row: row.model,
    "machine": lambda row: row.machine,
    "precision": lambda row: row.precision,
    "release": lambda row: row.release,
}


def _split(rows: Iterable[Row], ratios: Iterable[float], key: Callable[[Row], str]) -> dict[str, list[float]]:
    """By value: rows, median of predicted / measured, median error in %."""
    found: dict[str, list[float]] = {}
    for row, ratio in zip(rows, ratios, strict=True):
        found.setdefault(key(row), []).append(ratio)
    return {
        name: [
            len(all_),
            round(float(np.median(all_)), 3),
            round(float(np.median(100 * np.abs(np.array(all_) - 1))), 1),
        ]
        for name, all_ in sorted(found.items())
    }


def main() -> None:
    """Print the lines, their splits and, with `--rows`, every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with measured/*.csv")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", action="store_true")
    arguments = parser.parse_args()
    results = run(arguments.data)
    for result in results:
        print(f"{result.name}: {result.measured:.3g} (target {result.target}); {result.notes}")
    details = results[0].details
    for reason, count in sorted(details["excluded"].items()):
        print(f"  excluded {count:3d}: {reason}")
    for name, split in details["by"].items():
        print(f"  by {name}: {split}")
    for line in details["jobs"]:
        print(f"  {line}")
    if arguments.rows:
        for label, release, seconds, predicted in sorted(details["rows"]):
            print(f"  {label:80s} {release:9s} {seconds:8.2f} {predicted:8.2f} {predicted / seconds:6.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps([result.as_json for result in results], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
