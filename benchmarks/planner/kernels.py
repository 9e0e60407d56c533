"""Single kernels and collectives against public tables: constants fitted on half of each, errors on the other half.

`python -m benchmarks.planner.kernels --data DIR`
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks._result import Result
from benchmarks.planner import _tables
from benchmarks.planner.fit_constants import BETWEEN
from nereus.clusters.named import machine
from nereus.core import Link
from nereus.cost.kernel_fit import COLLECTIVE, Collectives, Kernels, errors, fit_kernels, fit_link
from nereus.cost.rows import Bools, Floats

SEED = 0


def run(data: Path) -> list[Result]:
    """One line for each class of operations and machine type."""
    found = []
    for name, gemms in _tables.gemms(data).items():
        found.append(_kernel_line("GEMM bf16", name, gemms))
    for decode, label in ((False, "attention, whole sequences"), (True, "attention, decode")):
        for name, attentions in _tables.attentions(data, decode).items():
            found.append(_kernel_line(label, name, attentions))
    for name, timed in _tables.collectives(data).items():
        found.append(_link_line("collectives in a node", name, timed, machine(name).links["intra"], tuple(COLLECTIVE)))
    for name, (timed, rate) in _tables.collectives_between_nodes(data).items():
        link = replace(machine(name).links["inter"], bytes_per_s=rate)
        found.append(_link_line("all-reduce between nodes", name, timed, link, BETWEEN))
    return found


def _kernel_line(label: str, name: str, timed: Kernels) -> Result:
    fitted_on = _half(len(timed.seconds))
    (kind,) = machine(name).kinds.values()
    fitted = fit_kernels(kind, timed[fitted_on], "bf16")
    rest = timed[~fitted_on]
    return _line(label, name, errors(rest.predicted(fitted, "bf16"), rest.seconds))


def _link_line(label: str, name: str, timed: Collectives, link: Link, names: tuple[str, ...]) -> Result:
    fitted_on = _half(len(timed.seconds))
    fitted = fit_link(link, timed[fitted_on], names)
    rest = timed[~fitted_on]
    return _line(label, name, errors(rest.predicted(fitted), rest.seconds))


def _line(label: str, name: str, found: Floats) -> Result:
    median, mean, p90 = 100 * np.median(found), 100 * found.mean(), 100 * np.quantile(found, 0.9)
    notes = f"{len(found)} held out; mean {mean:.1f}, p90 {p90:.1f}"
    return Result(f"{label}, {name}, median error %", "report", float(median), notes=notes)


def _half(size: int) -> Bools:
    return np.random.default_rng(SEED).random(size) < 0.5


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    for result in run(parser.parse_args().data):
        print(f"{result.name:58} {result.measured:5.1f}   {result.notes}")


if __name__ == "__main__":
    main()
