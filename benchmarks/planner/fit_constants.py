"""Fit the constants of machine types to public tables of operation times and write them into their files.

`python -m benchmarks.planner.fit_constants --data DIR`. Facts and comments of the files stay; what a type has no table
for it takes from the type it resembles most, as `LIKE` says.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.planner import _tables, serving
from nereus.clusters.named import machine
from nereus.core import DeviceKind, Link
from nereus.cost.kernel_fit import ATTENTION, DECODE_ATTENTION, GEMM, fit_kernels, fit_link

FOLDER = Path(__file__).parents[2] / "src" / "nereus" / "clusters" / "data"
LIKE = {
    "a100-40": ("a100-80",),
    "a100-64": ("a100-80",),
    "a100-80": (),
    "h100": ("h200",),
    "h200": ("h100",),
    "h800": ("h100", "h200"),
    "h20": ("h200", "h100"),
    "b200": ("h200",),
    "gb200": ("b200", "h200"),
    "b300": ("b200", "h200"),
    "gb300": ("gb200", "b200", "h200"),
    "mi250x": ("a100-80",),
    "mi300x": ("h100", "h200"),
}
"""Whose constants a type takes where it has no table of its own, the most alike first."""
KERNELS = (*GEMM, *ATTENTION, *DECODE_ATTENTION)
ENGINE = "vllm "
"""Of the engines with published decode steps the one that RL frameworks use most; of all machine types together."""
BETWEEN = ("collective.start_s", "collective.fill_s", "collective.fill_bytes", "all_reduce.share")


def kinds(data: Path) -> dict[str, DeviceKind]:
    """Every type with its kernels fitted, or taken from the type it resembles."""
    gemms = _tables.gemms(data)
    attentions = [_tables.attentions(data, decode) for decode in (False, True)]
    found = {name: next(iter(machine(name).kinds.values())) for name in LIKE}
    for table, names in ((gemms, GEMM), (attentions[0], ATTENTION), (attentions[1], DECODE_ATTENTION)):
        fitted = {name: fit_kernels(found[name], timed, "bf16") for name, timed in table.items()}
        for name, kind in found.items():
            source = _source(name, fitted)
            taken = {key: fitted[source].constants[key] for key in names}
            found[name] = replace(kind, constants=dict(kind.constants) | taken)
    of_engine = engine(data)
    return {name: replace(kind, constants=dict(kind.constants) | of_engine) for name, kind in found.items()}


def engine(data: Path) -> dict[str, float]:
    """Constants of a generation engine: fitted ones, and that it replays graphs and refills its batch."""
    tables = serving.groups(data)
    seconds = serving.measured(tables)
    constants = serving.fit(tables, seconds, np.ones(len(seconds), dtype=bool))
    fitted = {name: constants[f"{ENGINE}:{name}"] for name in serving.OF_ENGINE}
    return fitted | {"generation.launches": serving.FIXED["generation.launches"], "generation.refill": 1.0}


def links(data: Path) -> dict[str, dict[str, Link]]:
    """Both links of every type."""
    inside, between = _tables.collectives(data), _tables.collectives_between_nodes(data)
    fitted_inside = {name: fit_link(machine(name).links["intra"], timed) for name, timed in inside.items()}
    fitted_between = {
        name: fit_link(replace(machine(name).links["inter"], bytes_per_s=rate), timed, BETWEEN)
        for name, (timed, rate) in between.items()
    }
    found = {}
    for name in LIKE:
        cluster = machine(name)
        found[name] = {
            "intra": _taken(cluster.links["intra"], fitted_inside[_source(name, fitted_inside)]),
            "inter": _taken(cluster.links["inter"], fitted_between[_source(name, fitted_between)]),
        }
        share = found[name]["inter"].constants["all_reduce.share"]
        constants = dict(found[name]["inter"].constants) | {"gather.share": share}
        found[name]["inter"] = replace(found[name]["inter"], constants=constants)
    return found


def written(text: str, kind: DeviceKind, by_name: Mapping[str, Link]) -> str:
    """A cluster file with fitted values in place of its own; constants that it lacks come first in their block."""
    own = {name: value for name, value in kind.constants.items() if name in KERNELS or name.startswith("generation.")}
    fitted: dict[str, dict[str, float]] = {"kind": own}
    for name, link in by_name.items():
        fitted[name] = {"latency_s": link.latency_s} | dict(link.constants)
    section, lines = "", []
    for line in text.splitlines():
        key, indent = line.strip().partition(":")[0], line[: len(line) - len(line.lstrip())]
        section = key if key in fitted else section
        if key in fitted.get(section, {}):
            line = f"{indent}{key}: {_number(fitted[section].pop(key))}"
        lines.append(line)
        if key == "constants":
            new = [name for name in sorted(fitted[section]) if f"    {name}:" not in _section(text, section)]
            lines += [f"{indent}  {name}: {_number(fitted[section].pop(name))}" for name in new]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    by_type = links(data)
    for name, kind in sorted(kinds(data).items()):
        path = FOLDER / f"{name}.yaml"
        path.write_text(written(path.read_text(encoding="utf-8"), kind, by_type[name]), encoding="utf-8")


def _section(text: str, section: str) -> str:
    """The lines of one section up to the next."""
    rest = text[text.index(f"{section}:\n") :]
    ends = [rest.index(f"{other}:\n") for other in ("links", "intra", "inter") if f"{other}:\n" in rest[1:]]
    return rest[: min((end for end in ends if end > 0), default=len(rest))]


def _source(name: str, fitted: Mapping[str, object]) -> str:
    """The type itself where it was measured, else the one it resembles."""
    return next(like for like in (name, *LIKE[name]) if like in fitted)


def _taken(link: Link, fitted: Link) -> Link:
    return replace(link, latency_s=fitted.latency_s, constants=dict(link.constants) | dict(fitted.constants))


def _number(value: float) -> str:
    """Three digits, in a form that YAML reads as a number."""
    text = f"{value:.3g}"
    mantissa, e, exponent = text.partition("e")
    return text if not e else f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"


if __name__ == "__main__":
    main()
