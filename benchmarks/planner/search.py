"""The search against SCIP on the same candidates, its CPU time and memory, and what any DP degree is worth.

`python -m benchmarks.planner.search [--json FILE] [--out DIR] [--quick] [--limit S]`; `--out` keeps SCIP's model files
(.cip), which a third party can run. The job is PPO with five model-stages of Llama-3.1-8B on nodes of eight H200, or
where it says so GRPO whose generation goes on beside training.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any

from tests.oracles.scip_plans import Answer, columns_of, solve

from benchmarks._parts import table
from benchmarks._result import Result, at_most
from nereus.algorithms.grpo import Grpo
from nereus.algorithms.ppo import Ppo
from nereus.clusters.named import machine
from nereus.core import Capabilities, Head, Lengths, Workload
from nereus.families.models import named
from nereus.planning.choices import Arrangement, Choices
from nereus.planning.exact import Best
from nereus.planning.problem import Problem
from nereus.planning.search import search
from nereus.planning.select import fastest

MODEL, MACHINE, NODE = "llama-3.1-8b", "h200x8", 8
SEQUENCES, PROMPT, RESPONSE, P95 = 2048, 256, 2048.0, 3000.0
POWERS = (8, 16, 32, 64, 128, 256, 512, 1024)
ANY = (24, 96, 256, 1024)
IRREGULAR = (24, 28, 40, 48, 56, 96)
BESIDE = (64, 1024, 16384)
"""Pools of the asynchronous job; SCIP is asked about `BESIDE_SCIP`."""
BESIDE_SCIP = (8, 16, 32, 64, 1024)
LIMIT_S = 150.0
"""Of one SCIP solve: all of them together stay below three quarters of an hour."""
AGREES = 1 + 1e-6
KNOWN = 1.2
"""SCIP is told of a step so many times the one to beat."""


def problem(devices: int, dp: str, asynchronous: bool = False) -> Problem:
    """PPO, or asynchronous GRPO, on the first `devices` of as many nodes as they need."""
    spec = named(MODEL)
    specs = {"actor": spec, "reference": spec} | dict.fromkeys(("critic", "reward"), named(MODEL, head=Head.SCALAR))
    flow = replace((Grpo() if asynchronous else Ppo()).workflow(specs), asynchronous=asynchronous)
    whole = machine(MACHINE, -(-devices // NODE))
    cluster = whole if devices == len(whole.devices) else whole.only(whole.ids[:devices])
    sequences = max(SEQUENCES, devices)
    workload = Workload(sequences, 1, Lengths.constant(PROMPT), _lengths(), sequences // 4, 8192)
    return Problem(flow, workload, cluster, Capabilities(dp=dp))


def _lengths(levels: int = 21) -> Lengths:
    """A log-normal distribution of response lengths with this mean and 95th percentile."""
    z = NormalDist().inv_cdf(0.95)
    sigma = z - math.sqrt(z * z - 2 * math.log(P95 / RESPONSE))
    at = [min(max(level / (levels - 1), 0.001), 0.999) for level in range(levels)]
    mu = math.log(RESPONSE) - sigma**2 / 2
    quantiles = tuple(math.exp(mu + sigma * NormalDist().inv_cdf(share)) for share in at)
    return Lengths(RESPONSE, P95, quantiles[-1], quantiles)


def evaluated(asked: Problem) -> tuple[Choices, list[Arrangement]]:
    """Every candidate priced, every arrangement listed."""
    choices = Choices(asked, asked.model())
    return choices, list(choices.arrangements())


def against_scip(devices: int, dp: str, limit_s: float, out: Path | None, asynchronous: bool = False) -> list[Result]:
    """The same candidates for both: the ratio of their optima, and of their CPU times (ours warm, least of five)."""
    asked = problem(devices, dp, asynchronous)
    choices, arrangements = evaluated(asked)
    times_s: list[float] = []
    for _ in range(5):
        began_s = time.process_time()
        best = fastest(arrangements, asked.workflow, 1)
        times_s.append(time.process_time() - began_s)
    step_s = _step_s(best)
    (site,) = set(arrangements[0].sites.values())
    tables = {ms: choices.candidates(ms, site) for ms in asked.workflow.model_stages}
    calls = {ms: [call.name for call in asked.workflow.calls_of(ms)] for ms in tables}
    job = "asynchronous_grpo" if asynchronous else "ppo"
    file = None if out is None else out / f"{job}_{MODEL}_{devices}_{dp}.cip"
    answer = solve(
        asked.workflow,
        columns_of(tables, calls),
        len(site.slots),
        arrangements[0].room[0],
        KNOWN * step_s,
        limit_s,
        file,
    )
    where = f"{devices} devices, {dp} DP" + (", asynchronous" if asynchronous else "")
    hard = devices == 1024 and dp == "powers" and not asynchronous
    return _compared(where, step_s, min(times_s), answer, hard)


def _compared(where: str, step_s: float, search_s: float, answer: Answer, hard: bool) -> list[Result]:
    details = {
        "step_s": step_s, "search_s": search_s, "scip_step_s": answer.step_s, "scip_bound_s": answer.bound_s,
        "scip_s": answer.solve_s, "scip_status": answer.status, "binaries": answer.binaries,
    }  # fmt: skip
    proven = answer.status == "optimal"
    other_s = answer.step_s if proven else answer.bound_s
    note = f"SCIP {answer.status}, {answer.binaries} binaries, {answer.solve_s:.1f} s"
    ratio = step_s / other_s if other_s > 0 else None
    if other_s <= 0:
        note += "; it proved no bound in its limit"
    quality = Result(
        f"step s, {where}", "= 1.000 of SCIP's optimum" if proven else "report: of SCIP's bound",
        step_s, other_s, ratio, (ratio <= AGREES) if proven and ratio is not None else None, note, details,
    )  # fmt: skip
    faster, met = answer.solve_s / search_s, answer.solve_s >= 1000 * search_s if hard else None
    note, target = "" if proven else "SCIP stopped at its limit", "ratio >= 1000" if hard else "report"
    return [quality, Result(f"search s, {where}", target, search_s, answer.solve_s, faster, met, note)]


def cpu(devices: int, dp: str, limit_ms: float, repeats: int = 7) -> list[Result]:
    """Process CPU milliseconds to evaluate and search, and of a whole answer with eight placed plans (warm, least)."""
    asked = problem(devices, dp)
    parts: list[tuple[float, float]] = []
    whole: list[float] = []
    for _ in range(repeats):
        began = time.process_time()
        _, arrangements = evaluated(asked)
        priced = time.process_time()
        fastest(arrangements, asked.workflow, 1)
        parts.append((1e3 * (priced - began), 1e3 * (time.process_time() - priced)))
        began = time.process_time()
        search(asked)
        whole.append(1e3 * (time.process_time() - began))
    evaluate_ms, search_ms = min(parts, key=sum)
    note = f"evaluate {evaluate_ms:.1f} + search {search_ms:.1f} ms; an answer with 8 placed plans {min(whole):.1f} ms"
    name = f"evaluate + search CPU ms, {devices} devices, {dp} DP"
    return [at_most(name, limit_ms, evaluate_ms + search_ms, notes=note)]


def beside(devices: int, k: int) -> Result:
    """Process CPU milliseconds to evaluate the asynchronous job with any DP and find its `k` fastest layouts."""
    asked = problem(devices, "any", asynchronous=True)
    times_ms: list[tuple[float, float]] = []
    for _ in range(3):
        began = time.process_time()
        _, arrangements = evaluated(asked)
        priced = time.process_time()
        fastest(arrangements, asked.workflow, k)
        times_ms.append((1e3 * (priced - began), 1e3 * (time.process_time() - priced)))
    evaluate_ms, search_ms = min(times_ms, key=sum)
    name = f"evaluate + search CPU ms, {devices} devices, any DP, asynchronous, best {k}"
    note = f"evaluate {evaluate_ms:.1f} + search {search_ms:.1f} ms"
    return Result(name, "report", evaluate_ms + search_ms, notes=note)


def memory(devices: int, dp: str, asynchronous: bool = False) -> Result:
    """Growth of the resident set of a fresh process over one search."""
    job = "asynchronous" if asynchronous else "synchronous"
    command = [sys.executable, "-m", "benchmarks.planner.search", "--grow", str(devices), dp, job]
    grown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    name = f"RSS growth MB, {devices} devices, {dp} DP" + (", asynchronous" if asynchronous else "")
    return at_most(name, 100, float(grown))


def _grown(devices: int, dp: str, job: str) -> float:
    asked = problem(devices, dp, job == "asynchronous")
    before = _resident_mb("VmRSS")
    search(asked)
    return _resident_mb("VmHWM") - before


def _resident_mb(line: str) -> float:
    """Memory of this process as Linux tells it: now, or at most so far."""
    (found,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(line))
    return int(found.split()[1]) / 1024


def any_against_powers(pools: Sequence[int]) -> Result:
    """The predicted step with any DP degree over that with powers of two."""
    by_pool: dict[str, float] = {}
    for devices in pools:
        steps = [search(problem(devices, dp), 1).best[0].estimate.step_s for dp in ("any", "powers")]
        by_pool[str(devices)] = steps[0] / steps[1]
    note = ", ".join(f"{pool}: {ratio:.3f}" for pool, ratio in by_pool.items())
    return Result(
        "any DP / powers of two, predicted step", "report", mean(by_pool.values()), notes=note, details=by_pool
    )


def run(
    data: Path | None = None,  # noqa: ARG001
    limit_s: float = LIMIT_S,
    out: Path | None = None,
    quick: bool = False,
) -> list[Result]:
    """All lines; `quick` leaves large pools to SCIP out."""
    found = [
        *cpu(1024, "powers", 20), *cpu(16384, "powers", 100, 3), *cpu(1024, "any", 150, 3),
        memory(1024, "powers"), memory(16384, "powers"), memory(1024, "any"),
        *(beside(devices, k) for devices in BESIDE for k in (1, 8)),
        memory(16384, "any", asynchronous=True), any_against_powers(IRREGULAR),
    ]  # fmt: skip
    pools = [(devices, "powers") for devices in POWERS] + [(devices, "any") for devices in ANY]
    for devices, dp in pools[:2] if quick else pools:
        found += against_scip(devices, dp, limit_s, out)
    for devices in BESIDE_SCIP[:1] if quick else BESIDE_SCIP:
        found += against_scip(devices, "powers", limit_s, out, asynchronous=True)
    return found


def _step_s(best: Best) -> float:
    return min(found.step_s for found in best.found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, print a table, write the JSON."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.search", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write every number here")
    parser.add_argument("--out", type=Path, help="keep SCIP's model files in this folder")
    parser.add_argument("--quick", action="store_true", help="give SCIP the two smallest pools only")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of one SCIP solve")
    parser.add_argument("--grow", nargs=3, metavar=("DEVICES", "DP", "JOB"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.grow:
        print(_grown(int(given.grow[0]), *given.grow[1:]))
        return 0
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    found = run(None, given.limit, given.out, given.quick)
    Console(width=160).print(table("search", found))
    if given.json is not None:
        lines: list[dict[str, Any]] = [line.as_json for line in found]
        given.json.write_text(json.dumps(lines, indent=2, default=str) + "\n")
    return int(any(line.met is False for line in found))


if __name__ == "__main__":
    sys.exit(main())
