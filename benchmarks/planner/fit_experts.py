"""Fit what an engine's kernels of experts and of latent attention take to tables of measured ones, by device.

`python -m benchmarks.planner.fit_experts TYPE [--experts TABLE] [--latent TABLE]` prints constants of a machine type.
Tables are CSV with the columns of aiconfigurator's (ai-dynamo/aiconfigurator at 095f58a, `systems/data/*`, vLLM 0.19.0,
of A100 0.14.0): `moe_perf`, of which bf16 rows without expert parallelism count, balanced and mildly skewed, of models
with at least 16 experts; `mla_generation_module_perf` of DeepSeek-V3, of which bf16 rows of up to 4 M cached tokens do.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.planner._tables import read
from nereus.clusters.named import machine
from nereus.core import Calibration, Candidate, DeviceKind, Layout, ModelSpec, ModelStage, Stage
from nereus.cost.decoding import Engine
from nereus.cost.kernels import Rates
from nereus.cost.layer import Block, MicroBatch
from nereus.cost.rows import Floats, Rows
from nereus.cost.site import Site
from nereus.families.models import named

START = {"generation.experts_start_s": 1e-5, "generation.expert_s": 5e-7, "generation.experts_share": 0.5}
SKEWS = ("balanced", "power_law_1.01")
FEWEST = 16
MOST_CACHED = 4e6
"""Tokens that all sequences together have cached: more do not fit beside weights."""
GENERATION = ModelStage("actor", Stage.GENERATION)
Shape = tuple[int, int, int, int]
"""Hidden size, width of an expert, experts, experts of a token."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One shape on one device: tokens, tp and measured seconds by row."""

    block: Block
    seconds: Floats

    def predicted(self, constants: Floats) -> Floats:
        """Seconds with these constants, in the order of `START`."""
        start_s, expert_s, share = constants
        seconds, hit = self.block.experts(share)
        return np.asarray(start_s + expert_s * hit + seconds)


def timed(table: Path, kind: DeviceKind) -> dict[Shape, Timed]:
    """The rows that count, by shape."""
    found: dict[Shape, list[tuple[float, int, float]]] = {}
    for row in read(table):
        usable = row["moe_dtype"] == "bfloat16" and int(row["moe_ep_size"]) == 1 and row["distribution"] in SKEWS
        shape = (int(row["hidden_size"]), int(row["inter_size"]), int(row["num_experts"]), int(row["topk"]))
        if usable and shape[2] >= FEWEST:
            sizes = float(row["num_tokens"]), int(row["moe_tp_size"]), float(row["latency"]) / 1e3
            found.setdefault(shape, []).append(sizes)
    return {shape: _timed(shape, rows, kind) for shape, rows in found.items()}


def _timed(shape: Shape, measured: list[tuple[float, int, float]], kind: DeviceKind) -> Timed:
    hidden, width, experts, chosen = shape
    spec = ModelSpec(
        "qwen3_moe", 1, hidden, 64, 8, 128, width, 1024,
        experts=experts, experts_per_token=chosen, expert_hidden=width, dtype="bf16",
    )  # fmt: skip
    tokens, seconds = (np.array([row[index] for row in measured]) for index in (0, 2))
    rows = Rows.of([Candidate(GENERATION, Layout(tp), 1) for _, tp, _ in measured], 1, 64)
    return Timed(Block(spec, rows, _site(kind), MicroBatch(tokens, np.ones_like(tokens), tokens)), seconds)


def fit(shapes: list[Timed]) -> Floats:
    """The constants, robustly and in logarithms."""

    def residuals(logs: Floats) -> Floats:
        return np.concatenate([np.log(each.predicted(np.exp(logs)) / each.seconds) for each in shapes])

    return np.exp(least_squares(residuals, np.log(list(START.values())), loss="soft_l1", f_scale=0.2).x)


def _site(kind: DeviceKind) -> Site:
    """One device; its links are not used."""
    links = machine("h100").links
    return Site(Rates.of(kind, "bf16"), links["intra"], links["inter"], Calibration(), (kind,))


def latent(table: Path, kind: DeviceKind) -> tuple[float, Floats, Floats]:
    """Seconds of the small kernels around latent attention; with them the predicted and the measured ones."""
    spec, bare = named("DeepSeek-V3"), replace(kind, constants={**kind.constants, "generation.latent_s": 0.0})
    rows = [row for row in read(table) if {row["kv_cache_dtype"], row["gemm_type"]} == {"bfloat16"}]
    heads, live, cached, milliseconds = (
        np.array([float(row[name]) for row in rows]) for name in ("num_heads", "batch_size", "step", "latency")
    )
    fits = live * cached <= MOST_CACHED
    layouts = [Candidate(GENERATION, Layout(int(spec.heads / each)), 1) for each in heads[fits]]
    engine = Engine(spec, Rows.of(layouts, spec.layers, spec.heads), _site(bare))
    tokens = MicroBatch(live[fits], np.ones(fits.sum()), live[fits])
    block = Block(spec, engine.rows, engine.site, tokens)
    kernels_s, measured_s = block.projections_s() + engine.cached_s(live[fits], cached[fits]), milliseconds[fits] / 1e3

    def residuals(log: Floats) -> Floats:
        return np.asarray(np.log((kernels_s + np.exp(log)) / measured_s))

    found = float(np.exp(least_squares(residuals, [np.log(5e-5)], loss="soft_l1", f_scale=0.2).x[0]))
    return found, kernels_s + found, measured_s


def main() -> None:
    """Print constants and their errors; of experts also that on each shape when it is left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("type", help="machine type whose other constants are taken, such as h100")
    parser.add_argument("--experts", type=Path)
    parser.add_argument("--latent", type=Path)
    arguments = parser.parse_args()
    (kind,) = machine(arguments.type).kinds.values()
    if arguments.latent:
        found, predicted, measured = latent(arguments.latent, kind)
        print(f"generation.latent_s: {found:.3g}; median error {_median([(predicted, measured)]):.1f} %")
    if arguments.experts:
        _experts(timed(arguments.experts, kind))


def _experts(shapes: dict[Shape, Timed]) -> None:
    constants = fit(list(shapes.values()))
    for name, value in zip(START, constants, strict=True):
        print(f"{name}: {value:.3g}")
    inside = [(each.predicted(constants), each.seconds) for each in shapes.values()]
    left_out = [
        (each.predicted(fit([other for name, other in shapes.items() if name != shape])), each.seconds)
        for shape, each in shapes.items()
    ]
    print(f"median error {_median(inside):.1f} %, of shapes left out {_median(left_out):.1f} %, {len(shapes)} shapes")


def _median(pairs: list[tuple[Floats, Floats]]) -> float:
    return float(100 * np.median(np.concatenate([np.abs(predicted / measured - 1) for predicted, measured in pairs])))


if __name__ == "__main__":
    main()
