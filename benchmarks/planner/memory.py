"""Predicted memory against measured: Megatron-LM's CI records, torchtitan's peaks, Korthikanti's formulas.

Run with `python -m benchmarks.planner.memory --data DIR`. Only facts of libraries enter: sizes of workspaces, which
optimizer state a framework keeps. Nothing is fitted to the rows.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks._result import Result, at_most
from nereus.clusters.named import machine
from nereus.core import Candidate, DeviceKind, Layout, Lengths, ModelSpec, ModelStage, Stage, Work, Workload
from nereus.cost.memory import Memory
from nereus.cost.ranks import Ranks
from nereus.cost.rows import Rows

TRAINING = ModelStage("actor", Stage.TRAINING)
Row = Mapping[str, str]

OTHER_FEATURES = (
    "grpo", "rl", "mamba", "fsdp", "mtp", "fp8", "fp4", "mla", "frozen", "inference", "_resume_", "offload", "static",
    "dynamic", "swa", "router",
)  # fmt: skip
"""Parts of names of CI cases that test something else than plain dense training."""
VOCABULARY, NULL_TOKENIZER_VOCABULARY, RELEASE_VOCABULARY = 50_257, 131_072, 256_000
RELEASE_REPLICAS, CI_DEVICES = 16, 8
DETERMINISTIC_WORKSPACE_BYTES = 32 * 2**20
"""CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic CI cases set (PyTorch then takes 8 x 4 MiB a handle)."""
FUSED_NORMS = {"memory.norm_copies": 0.5}
ONE_NODE_DEVICES = {"gb200": 4}
"""A record of one node has as many devices as a node of its kind."""
MANY_MICRO_BATCHES = 4
"""A record without a batch size has at least so many micro-batches for every pp rank."""
LARGE_PARAMETERS = 6e9
CAPACITIES_BYTES = tuple(gib * 2**30 for gib in range(16, 81))
HEADROOM = 0.1
GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Run:
    """A measured training job: what the product is asked, and what was measured (0 where nothing was)."""

    name: str
    memory: Memory
    candidate: Candidate
    resident_bytes: float
    peak_bytes: float

    @property
    def _ends(self) -> tuple[Rows, tuple[Ranks, ...]]:
        layers = self.memory.spec.layers
        rows = Rows.of([self.candidate], layers, node_size=8)
        return rows, Ranks.ends(rows, layers)

    def stored(self, rank: int = -1) -> float:
        """Predicted bytes between steps on a pp rank: state, gradients (kept by Megatron), workspaces."""
        rows, ranks = self._ends
        load = self.memory.at(rows, ranks[rank])
        kept = (*load.stored.values(), load.transient(Work.UPDATE)["gradients"])
        return sum(float(size[0]) for size in kept) + self.memory.kind.constants["workspace.bytes"]

    def peak(self, rank: int = -1) -> float:
        """Predicted bytes at the peak of an update on a pp rank, as an allocator counts them."""
        rows, ranks = self._ends
        terms = self.memory.transient(rows, ranks[rank], Work.UPDATE)
        return self.stored(rank) + sum(float(size[0]) for name, size in terms.items() if name != "gradients")


def ci_runs(data: Path) -> Iterator[Run]:
    """The dense GPT records, by name; those whose vocabulary no column gives take that of their tokenizer."""
    for row in _rows(data / "measured" / "megatron_lm_ci_memory_and_iteration_time.csv"):
        if _is_plain(row):
            yield _ci_run(row)


def _is_plain(row: Row) -> bool:
    case = row["case"]
    if not case.startswith("gpt/") or _number(row, "num-experts", 0) or not row["mem_allocated_bytes"]:
        return False
    if any(part in case for part in OTHER_FEATURES) or row["fp8-format"] or row["use-megatron-fsdp"]:
        return False
    # A name that speaks of pipeline ranks without a column for them: the record is of another configuration.
    return not ("pp" in case and _number(row, "pipeline-model-parallel-size", 1) == 1 and "pp1" not in case)


def _ci_run(row: Row) -> Run:
    tp, pp, cp = (_number(row, f"{name}-parallel-size", 1) for name in ("tensor-model", "pipeline-model", "context"))
    release = "15b" in row["case"]
    devices = ONE_NODE_DEVICES.get(row["gpu"], CI_DEVICES) if row["case"].endswith("_1node") else CI_DEVICES
    dp = RELEASE_REPLICAS if release else max(1, devices // (tp * pp * cp))
    micro_batch = _number(row, "micro-batch-size", 1)
    batch = _number(row, "global-batch-size", MANY_MICRO_BATCHES * pp * dp * micro_batch)
    layers, chunk = _number(row, "num-layers", 0), _number(row, "num-layers-per-virtual-pipeline-stage", 0)
    candidate = Candidate(
        TRAINING,
        Layout(tp, pp),
        dp,
        micro_batch,
        recompute="full" if row["recompute-granularity"] == "full" else "none",
        zero=1 if row["use-distributed-optimizer"] else 0,
        cp=cp,
        sequence_parallel=bool(row["sequence-parallel"]),
        vpp=max(1, layers // pp // chunk) if chunk else 1,
    )
    memory = Memory(_ci_spec(row, tp), True, _training(_number(row, "seq-length", 0), batch), _ci_kind(row, tp))
    peak_bytes = float(row["mem_max_allocated_bytes"] or 0)
    return Run(f"{row['case']} {row['gpu']}", memory, candidate, float(row["mem_allocated_bytes"]), peak_bytes)


def _ci_spec(row: Row, tp: int) -> ModelSpec:
    hidden, heads = _number(row, "hidden-size", 0), _number(row, "num-attention-heads", 0)
    vocabulary = VOCABULARY
    if "15b" in row["case"]:
        vocabulary = RELEASE_VOCABULARY
    elif "Null" in row["tokenizer-type"]:
        vocabulary = NULL_TOKENIZER_VOCABULARY
    step = _number(row, "make-vocab-size-divisible-by", 128) * tp
    return ModelSpec(
        family="gpt2",
        layers=_number(row, "num-layers", 0),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(row, "num-query-groups", heads) if row["group-query-attention"] else heads,
        head_dim=_number(row, "kv-channels", hidden // heads),
        ffn_hidden=_number(row, "ffn-hidden-size", 4 * hidden),
        vocab=math.ceil(_number(row, "vocab-size", vocabulary) / step) * step,
        tied_embeddings=not row["untie-embeddings-and-output-weights"],
        dtype="bf16" if row["bf16"] or row["fp16"] else "fp32",
        gated=bool(row["swiglu"]),
        biases=True,
        layer_norm=True,
        learned_positions=True,
        max_positions=_number(row, "seq-length", 0),
    )


def _ci_kind(row: Row, tp: int) -> DeviceKind:
    """The device. Cases whose attention is not fused are deterministic; Megatron's own keeps a buffer of scores."""
    kind = device({"h100": "h100", "gb200": "gb200"}.get(row["gpu"], "a100-80"))
    workspace_bytes, own = kind.constants["workspace.bytes"], row["transformer-impl"] == "local"
    if row["attention-backend"] == "unfused" or own:
        engine_bytes = 4 * 2**20 if workspace_bytes < DETERMINISTIC_WORKSPACE_BYTES else DETERMINISTIC_WORKSPACE_BYTES
        workspace_bytes = 2 * DETERMINISTIC_WORKSPACE_BYTES + engine_bytes
    if own:
        scores = _number(row, "num-attention-heads", 0) / tp * _number(row, "seq-length", 0) ** 2
        workspace_bytes += 2 * _number(row, "micro-batch-size", 1) * scores
    return replace(kind, constants={**kind.constants, **FUSED_NORMS, "workspace.bytes": workspace_bytes})


def device(name: str) -> DeviceKind:
    """A kind of device by the name of its machine type."""
    (kind,) = machine(name).kinds.values()
    return kind


def false_fits(runs: Sequence[Run]) -> list[str]:
    """Runs that some capacity is said to hold, headroom left, and that need more than it."""
    return [
        run.name
        for run in runs
        if any(run.peak() <= (1 - HEADROOM) * capacity < capacity < run.peak_bytes for capacity in CAPACITIES_BYTES)
    ]


def titan_runs(data: Path, models: Mapping[str, ModelSpec]) -> Iterator[Run]:
    """torchtitan's records: FSDP over the replicas; its selective recomputation drops more than ours."""
    for row in _rows(data / "measured" / "torchtitan_llama3_throughput_memory.csv"):
        degrees = {key: _degree(row["parallelism"], key) for key in ("fsdp", "tp", "pp", "cp")}
        spec = models.get(row["model"])
        if spec is None or not row["peak_memory_gib"]:
            continue
        devices = _number(row, "gpus", 1)
        dp = devices // (degrees["tp"] * degrees["pp"] * degrees["cp"])
        micro_batch = max(1, _number(row, "local_batch", 1) // (degrees["pp"] if degrees["pp"] > 1 else 1))
        candidate = Candidate(
            TRAINING,
            Layout(degrees["tp"], degrees["pp"]),
            dp,
            micro_batch,
            recompute="full" if row["activation_ckpt"].startswith("full") else "selective",
            zero=3,
            cp=degrees["cp"],
            sequence_parallel=degrees["tp"] > 1,
        )
        workload = _training(_number(row, "seq_len", 8192), dp * _number(row, "local_batch", 1))
        memory = Memory(spec, True, workload, device("h100"))
        name = f"{row['model']} {row['parallelism']} {row['activation_ckpt']} {row['technique']}"
        yield Run(name, memory, candidate, 0.0, float(row["peak_memory_gib"]) * GIB)


def korthikanti(data: Path) -> list[tuple[str, float, float]]:
    """(case, ours, theirs): activation bytes of their formulas, which count dropout masks too (2 of 34 bytes)."""
    found = []
    for row in _rows(data / "measured" / "korthikanti2022_time_memory.csv"):
        # Without recomputation they keep the scores of attention, which flash attention does not have.
        if row["metric"] != "activation_memory_gib" or row["recompute"] == "none":
            continue
        layers, hidden, heads, tp = (_number(row, key, 1) for key in ("layers", "hidden", "heads", "tp"))
        spec = ModelSpec(
            "gpt2", layers, hidden, heads, heads, hidden // heads, _number(row, "ffn", 4 * hidden), vocab=51_200,
            dtype="bf16", gated=False, biases=True, layer_norm=True, learned_positions=True, tied_embeddings=True,
        )  # fmt: skip
        candidate = Candidate(
            TRAINING,
            Layout(tp, _number(row, "pp", 1)),
            _number(row, "dp", 1),
            _number(row, "micro_batch", 1),
            recompute="full" if row["recompute"].startswith("full") else "selective",
            sequence_parallel="sequence" in row["recompute"],
            vpp=_number(row, "vpp", 1),
        )
        kind = device("a100-80")
        fused = replace(kind, constants={**kind.constants, **FUSED_NORMS})
        memory = Memory(spec, True, _training(_number(row, "seq_len", 2048), _number(row, "global_batch", 1)), fused)
        rows = Rows.of([candidate], spec.layers, 8)
        terms = memory.transient(rows, Ranks.ends(rows, spec.layers)[0], Work.UPDATE)
        found.append((f"{row['model']} {row['recompute']}", float(terms["activations"][0]), float(row["value"]) * GIB))
    return found


def run(data: Path) -> list[Result]:
    """Every line of this part."""
    runs = list(ci_runs(data))
    errors = np.array([each.stored() / each.resident_bytes - 1 for each in runs])
    large = [each for each in runs if _parameters(each.memory.spec) > LARGE_PARAMETERS and each.peak_bytes]
    wrong = false_fits(large)
    worst = sorted(zip(errors.tolist(), (each.name for each in runs), strict=True), key=lambda pair: -abs(pair[0]))
    peaks = [[each.name, round(each.peak() / GIB, 2), round(each.peak_bytes / GIB, 2)] for each in large]
    every = np.array([each.peak() / each.peak_bytes - 1 for each in runs if each.peak_bytes])
    return [
        at_most(
            "resident memory, dense GPT records of the Megatron CI, MAPE %",
            5.5,
            100 * float(np.abs(errors).mean()),
            notes=f"{len(runs)} records, median {100 * np.median(errors):+.1f} %, "
            f"within 5 % {100 * np.mean(np.abs(errors) < 0.05):.0f} %",
            details={"worst": worst[:10]},
        ),
        at_most(
            "false fits among its records of 7B and more",
            0,
            len(wrong),
            notes=f"{len(large)} records, 16 to 80 GiB",
            details={"wrong": wrong, "peak_gib": peaks},
        ),
        Result(
            "peak memory, the same records, MAPE %",
            "report",
            100 * float(np.abs(every).mean()),
            notes=f"median {100 * np.median(every):+.1f} %, too low by more than 10 %: {int((every < -0.1).sum())}",
        ),
        *_others(data),
    ]


def _others(data: Path) -> list[Result]:
    from nereus.families.models import named

    models = {f"llama3.1-{size}": named(f"llama-3.1-{size}", dtype="bf16") for size in ("8b", "70b", "405b")}
    titan = [
        (each.name, max(each.peak(rank) for rank in (0, -1)), each.peak_bytes) for each in titan_runs(data, models)
    ]
    formulas = korthikanti(data)
    found = []
    for name, pairs in (("torchtitan, peak memory", titan), ("Korthikanti's activation formulas", formulas)):
        if pairs:
            ratios = np.array([ours / theirs - 1 for _, ours, theirs in pairs])
            details = {case: [round(ours / GIB, 2), round(theirs / GIB, 2)] for case, ours, theirs in pairs}
            notes = f"{len(pairs)} rows, median {100 * np.median(ratios):+.1f} %"
            found.append(
                Result(
                    f"{name}, mean difference %",
                    "report",
                    100 * float(np.abs(ratios).mean()),
                    notes=notes,
                    details=details,
                )
            )
    return found


def _training(tokens: int, batch: int) -> Workload:
    """Pre-training as a workload: every sequence is one response of full length."""
    return Workload(batch, 1, Lengths.constant(0), Lengths.constant(tokens), batch, tokens)


def _parameters(spec: ModelSpec) -> float:
    query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = spec.hidden * (2 * query + 2 * keys) + (3 if spec.gated else 2) * spec.hidden * spec.ffn_hidden
    return float(spec.layers * layer + spec.vocab * spec.hidden)


def _degree(text: str, key: str) -> int:
    digits = [
        part.removeprefix(key) for part in text.replace("+", " ").replace(",", " ").split() if part.startswith(key)
    ]
    return int(digits[0]) if digits and digits[0].isdigit() else 1


def _rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _number(row: Row, key: str, default: int) -> int:
    return int(float(row[key])) if row.get(key) not in ("", None) else default


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the measured tables")
    for result in run(parser.parse_args().data):
        met = {True: "met", False: "MISSED", None: ""}[result.met]
        print(f"{result.name:70s} {result.target:10s} {result.measured:8.2f} {met:7s} {result.notes}")
        for key, value in result.details.items():
            print(f"    {key}: {value}")


if __name__ == "__main__":
    main()
