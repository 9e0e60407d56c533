"""Constants of devices that no table of operations gives, fitted to published training steps, and what they predict.

Few and physical: what products in low precision and grouped products of experts reach, and element-wise traffic.
Tested on the configurations left out of the fit.

`python -m benchmarks.planner.fit_rows --data DIR` prints the constants.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks._result import Result, at_most
from benchmarks.planner.rows import ACTOR, Row, bridge, columns, model_of
from nereus.cost.step import StepModel

Floats = NDArray[np.float64]

GENERATION = {"h100": "hopper", "h200": "hopper", "b200": "blackwell", "gb200": "blackwell"}
PRIORS: Mapping[str, tuple[float, float]] = {
    "hopper gemm.low_share": (0.8, 0.3),
    "blackwell gemm.low_share": (0.8, 0.3),
    "all stream.activation": (1.5, 0.4),
    "hopper gemm.experts_share": (0.7, 0.5),
    "blackwell gemm.experts_share": (0.7, 0.5),
}
"""Start value and standard deviation of the logarithm of each constant, by the devices that share it."""
SEEDS = 3
NOISE = 0.15
"""Of the logarithm of a row: releases of one configuration differ by as much."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A row with its columns and the model that prices it."""

    row: Row
    model: StepModel

    def seconds(self, logs: Floats) -> float:
        """The row's prediction under other constants."""
        changed = constants(logs, self.row.machine.removesuffix("x64"))
        cluster = self.model.cluster
        kinds = {name: replace(kind, constants={**kind.constants, **changed}) for name, kind in cluster.kinds.items()}
        model = StepModel(self.model.workflow, self.model.workload, replace(cluster, kinds=kinds))
        price = model.price(ACTOR, columns(self.row), tuple(kinds), self.row.precision)
        return float(price.call_s["update"][0])


def constants(logs: Floats, kind: str) -> dict[str, float]:
    """The constants of a kind of device."""
    found = {}
    for key, value in zip(PRIORS, np.exp(logs), strict=True):
        devices, name = key.split()
        if devices in ("all", GENERATION[kind]):
            found[name] = float(value)
    return found


def fit(rows: Sequence[Priced]) -> Floats:
    """Logarithms of the constants that explain the rows best; a configuration counts once, however often measured."""
    counts = Counter(_configuration(priced.row) for priced in rows)
    weights = np.array([counts[_configuration(priced.row)] ** -0.5 for priced in rows])
    measured = np.log([priced.row.seconds for priced in rows])
    start = np.log([value for value, _ in PRIORS.values()])
    spread = np.array([sd for _, sd in PRIORS.values()])

    def residuals(logs: Floats) -> Floats:
        predicted = np.log([priced.seconds(logs) for priced in rows])
        return np.concatenate([weights * (predicted - measured) / NOISE, (logs - start) / spread])

    return np.asarray(
        least_squares(residuals, start, loss="soft_l1", diff_step=np.full(len(start), 1e-2), max_nfev=10).x
    )


def held_out(rows: Sequence[Priced], seed: int) -> Floats:
    """Errors in % of rows whose configuration was not fitted: two halves of the configurations, each way."""
    names = sorted({_configuration(priced.row) for priced in rows})
    half = set(np.random.default_rng(seed).permutation(names)[: len(names) // 2])
    errors = []
    for inside in (True, False):
        logs = fit([priced for priced in rows if (_configuration(priced.row) in half) is inside])
        for priced in rows:
            if (_configuration(priced.row) in half) is not inside:
                errors.append(100 * abs(priced.seconds(logs) / priced.row.seconds - 1))
    return np.array(errors)


def run(data: Path) -> list[Result]:
    """The part's line of the benchmark table."""
    rows = [Priced(row, model_of(row)) for row in bridge(data).rows]
    draws = [held_out(rows, seed) for seed in range(SEEDS)]
    medians = [float(np.median(errors)) for errors in draws]
    notes = (
        f"{len(rows)} rows by halves of their configurations, median of {SEEDS} draws ({min(medians):.1f} to "
        f"{max(medians):.1f}); p90 {np.median([np.percentile(errors, 90) for errors in draws]):.0f}"
    )
    name = "Megatron-Bridge, configurations left out of the fit, median error %"
    return [at_most(name, 15, float(np.median(medians)), notes=notes, details={"by_seed": medians})]


def _configuration(row: Row) -> str:
    return f"{row.label} {row.batch}"


def main() -> None:
    """Print the constants and the error on configurations left out, by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with measured/*.csv")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parser.parse_args()
    rows = [Priced(row, model_of(row)) for row in bridge(arguments.data).rows]
    logs = fit(rows)
    for key, value in zip(PRIORS, np.exp(logs), strict=True):
        print(f"{key}: {value:.3g}")
    fitted = [100 * abs(priced.seconds(logs) / priced.row.seconds - 1) for priced in rows]
    print(f"fitted rows: median error {np.median(fitted):.1f} %")
    for seed in range(arguments.seeds):
        errors = held_out(rows, seed)
        print(f"left out, seed {seed}: median error {np.median(errors):.1f} %, p90 {np.percentile(errors, 90):.0f} %")


if __name__ == "__main__":
    main()
