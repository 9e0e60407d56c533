"""Decode steps of serving engines: time for each output token, published, against predictions.

`python -m benchmarks.planner.serving --data DIR`. Kernels and links have the constants of their machine types. Fitted
on two thirds of the rows with a stated precision: what an engine takes between steps, and how far products in fp8 and
fp4 and an engine's own all-reduce get. The last third is held out, by seed. A second table, of another engine's whole
throughput, is predicted with the constants that the first one gave.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks._result import Result, at_most
from benchmarks.planner._tables import TYPES, Row, read
from nereus.clusters.named import machine
from nereus.core import (
    DTYPE_BYTES,
    Calibration,
    Candidate,
    Cluster,
    DeviceKind,
    Layout,
    ModelSpec,
    ModelStage,
    Stage,
)
from nereus.cost.decoding import Engine, Parts
from nereus.cost.kernels import Rates
from nereus.cost.parameters import parameters
from nereus.cost.rows import Bools, Floats, Rows
from nereus.cost.site import Site
from nereus.families.models import named

SEEDS = range(5)
MODELS = {
    "Qwen/Qwen3-32B": "Qwen3-32B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen3-32B",
    "meta-llama/Llama-3.1-70B": "Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "Llama-3.1-8B",
}
GENERATION = ModelStage("actor", Stage.GENERATION)
COMMON = {"low.fp8": 0.8, "low.fp4": 0.6}
OF_ENGINE = {"generation.step_s": 1e-3, "generation.sequence_s": 1e-5, "generation.reduce": 0.7}
PREFILL = "prefill"
"""Of each engine too: the part of the prompts that it computes, the rest is found in its cache or hidden."""
MEMORY_SHARE, OTHER_BYTES = 0.9, 4e9
"""What engines claim of a device, and what is neither weights nor KV cache."""
FIXED = {"generation.launches": 0.02, "generation.kv_bytes": 1.0}
"""Decode steps are replayed as graphs; engines in fp8 and fp4 keep keys and values in fp8."""
MOST_SEQUENCES = 2048.0
"""What TensorRT-LLM admits at once by default."""
HOLD = 0.05
"""Pull of a constant's logarithm to its start, beside residuals of one row."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one model on one type of machine, with one precision and one engine."""

    spec: ModelSpec
    cluster: Cluster
    precision: str
    engine: str
    index: Floats
    rows: Rows
    batch: Floats
    prompt: Floats
    response: Floats
    seconds: Floats

    def predicted(self, constants: Mapping[str, float]) -> Floats:
        """Seconds for each output token."""
        return self.load(constants)[1]

    def load(self, constants: Mapping[str, float]) -> tuple[Floats, Floats]:
        """Sequences at once, and seconds for each output token: a decode step, and what prompts of others take."""
        own = {name: constants[f"{self.engine}:{name}"] for name in OF_ENGINE}
        (kind,) = self.cluster.kinds.values()
        low = {"gemm.low_share": constants.get(f"low.{self.precision}", 1.0)}
        kind = replace(kind, constants=dict(kind.constants) | FIXED | own | low)
        links, rates = self.cluster.links, Rates.of(kind, self.precision)
        engine = Engine(self.spec, self.rows, Site(rates, links["intra"], links["inter"], Calibration(), (kind,)))
        context = self.prompt + self.response / 2
        live = np.minimum(self.batch, self._room_bytes(engine, kind) / (engine.token_bytes * context))
        step = engine.step(live, context)
        prompts = engine.prefill(np.ones_like(self.batch), self.prompt)
        shared_s = live / self.response * self._seconds(prompts) * constants[f"{self.engine}:{PREFILL}"]
        return live, self._seconds(step) + engine.between_s(live) + shared_s

    def _room_bytes(self, engine: Engine, kind: DeviceKind) -> Floats:
        """What is left for the KV cache of a device beside the weights."""
        element_bytes = engine.site.rates.low_bytes or DTYPE_BYTES[self.spec.dtype]
        weights = parameters(self.spec, self.rows.tp).total * element_bytes
        return np.asarray(np.maximum(MEMORY_SHARE * kind.memory_bytes - weights - OTHER_BYTES, 1e9))

    def _seconds(self, parts: Parts) -> Floats:
        layers = self.spec.layers
        return layers * (parts.dense + 2 * parts.reduce) + parts.embed + parts.reduce + parts.head + parts.gather


def _rows(data: Path) -> list[Row]:
    """Rows with a stated precision, of models and machines that are known here."""
    table = read(data / "measured" / "serving_ttft_tpot_dense.csv")
    return [row for row in table if row["precision"] and row["model_path"] in MODELS and row["system"] in TYPES]


def groups(data: Path) -> list[Group]:
    """The rows with a stated precision."""
    found: dict[tuple[str, str, str, str], list[tuple[int, Row]]] = {}
    for index, row in enumerate(_rows(data)):
        engine = f"{row['backend']} {row['backend_version']}"
        key = (MODELS[row["model_path"]], TYPES[row["system"]], row["precision"], engine)
        found.setdefault(key, []).append((index, row))
    return [_group(*key, members) for key, members in found.items()]


def _group(model: str, kind: str, precision: str, engine: str, members: list[tuple[int, Row]]) -> Group:
    spec = named(model)
    layouts = [Layout(int(float(row["tp_size"]))) for _, row in members]
    rows = Rows.of([Candidate(GENERATION, layout, 1) for layout in layouts], spec.layers, 8)
    columns = ("batch_size", "isl", "osl", "silicon_tpot_ms")
    batch, prompt, response, milliseconds = (np.array([float(row[name]) for _, row in members]) for name in columns)
    index = np.array([index for index, _ in members])
    return Group(spec, machine(kind), precision, engine, index, rows, batch, prompt, response, milliseconds / 1e3)


def measured(tables: list[Group]) -> Floats:
    """Measured seconds of all rows, in their order."""
    seconds = np.zeros(sum(len(group.index) for group in tables))
    for group in tables:
        seconds[group.index.astype(int)] = group.seconds
    return seconds


def predict(tables: Iterable[Group], constants: Mapping[str, float], size: int) -> Floats:
    """Predictions of all rows, in their order."""
    found = np.zeros(size)
    for group in tables:
        found[group.index.astype(int)] = group.predicted(constants)
    return found


def fit(tables: list[Group], seconds: Floats, rows: Bools) -> dict[str, float]:
    """The engines' constants from some of the rows."""
    engines = sorted({group.engine for group in tables})
    own = OF_ENGINE | {PREFILL: 1.0}
    start = COMMON | {f"{engine}:{name}": value for engine in engines for name, value in own.items()}
    names, origin = list(start), np.log(list(start.values()))

    def residuals(logs: Floats) -> Floats:
        predicted = predict(tables, dict(zip(names, np.exp(logs).tolist(), strict=True)), len(seconds))
        return np.concatenate([np.log(predicted / seconds)[rows], HOLD * (logs - origin)])

    found = least_squares(
        residuals, origin, loss="soft_l1", f_scale=0.1, jac_sparsity=_touched(tables, names, rows), ftol=1e-4, xtol=1e-4
    )
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))


def _touched(tables: list[Group], names: list[str], rows: Bools) -> Bools:
    """Which residuals depend on which constants: a row on those of its engine and the common ones."""
    found = np.zeros((len(rows), len(names)), dtype=bool)
    for group in tables:
        mine = [name in COMMON or name.startswith(f"{group.engine}:") for name in names]
        found[group.index.astype(int)] = mine
    return np.vstack([found[rows], np.eye(len(names), dtype=bool)])


def throughput(data: Path, constants: Mapping[str, float]) -> Result:
    """Output tokens a second of TensorRT-LLM at full load, with the constants of its serving rows."""
    ratios = []
    for row in read(data / "measured" / "trtllm_generation_throughput.csv"):
        tp, prompt, response = int(row["tp"]), float(row["input_len"]), float(row["output_len"])
        spec = named(row["model"].replace(" ", "-"))
        rows = Rows.of([Candidate(GENERATION, Layout(tp), 1)], spec.layers, 8)
        columns = (np.array([value]) for value in (MOST_SEQUENCES, prompt, response, 1.0))
        group = Group(spec, machine(row["gpu"].lower()), row["dtype"].lower(), "trtllm ", np.zeros(1), rows, *columns)
        live, seconds = group.load(constants)
        ratios.append(float(live[0] / seconds[0]) / float(row["output_tokens_per_s_total"]))
    error = 100 * np.abs(np.array(ratios) - 1)
    notes = f"{len(ratios)} rows of TensorRT-LLM; mean {error.mean():.1f}, median ratio {np.median(ratios):.2f}"
    return Result("full-load throughput, median error %", "report", float(np.median(error)), notes=notes)


def run(data: Path) -> list[Result]:
    """Held-out errors of the median draw."""
    tables = groups(data)
    seconds = measured(tables)
    draws = []
    for seed in SEEDS:
        held_out = np.zeros(len(seconds), dtype=bool)
        held_out[np.random.default_rng(seed).choice(len(seconds), len(seconds) // 3, replace=False)] = True
        constants = fit(tables, seconds, ~held_out)
        error = np.abs(predict(tables, constants, len(seconds)) / seconds - 1)[held_out]
        draws.append((100 * error.mean(), 100 * np.quantile(error, 0.9), 100 * np.median(error)))
    mape, p90, median = np.median(draws, axis=0)
    notes = f"{len(seconds) // 3} of {len(seconds)} rows held out, median of {len(draws)} draws; median {median:.1f}"
    return [
        at_most("TPOT held-out third, MAPE %", 11, float(mape), notes=notes),
        at_most("TPOT held-out third, p90 %", 20, float(p90)),
        throughput(data, constants),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    for result in run(parser.parse_args().data):
        print(f"{result.name:40} {result.measured:6.1f}  {result.target:8} {result.met}  {result.notes}")


if __name__ == "__main__":
    main()
