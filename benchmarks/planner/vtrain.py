"""Training time against 1,549 published iterations of GPT models on 2 to 512 A100 (VIA-Research/vTrain).

The machine's constants start from its file; what the framework of those runs needs (Megatron-DeepSpeed: unfused
attention, fp16, full recomputation) and how far the machine gets there is fitted on a few runs and tested on the rest.

`python -m benchmarks.planner.vtrain --data DIR [--json FILE]`; the other side runs when its environment exists (see
`benchmarks/baselines/llm_analysis.py`).
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks._result import Result, at_least, at_most
from nereus.clusters.named import machine
from nereus.core import Calibration, Candidate, Layout, Lengths, ModelSpec, ModelStage, Stage, Workload
from nereus.cost.fit import Constant, Fit, Measured, fit, predict
from nereus.cost.kernels import Rates
from nereus.cost.rows import Floats, Ints, Rows
from nereus.cost.site import Site

NODE = 8
VOCABULARY = 51_200
DRAWS = 9
LLM_ANALYSIS = Path("build/llm-analysis/bin/python")
BASELINE = Path(__file__).parents[1] / "baselines" / "llm_analysis.py"
TRAINING = ModelStage("actor", Stage.TRAINING)

KNOWN = {
    "device.gemm.share": 0.07,
    "device.gemm.half_k": 0.2,
    "device.gemm.half_mn": 0.2,
    "device.stream.share": 0.1,
    "intra.all_reduce.share": 0.1,
    "inter.bytes_per_s": 0.4,
    "inter.latency_s": 1.0,
}
"""Constants that tables of single operations tell, and how far they may differ in a whole run."""

FRAMEWORK = (
    Constant("device.attention.share", 0.45, 0.3, 1.0),
    Constant("device.attention.scores", 7.0, 0.4),
    Constant("device.attention.unfused", 12.0, 0.5),
    Constant("device.stream.activation", 1.3, 0.4),
    Constant("device.launch_s", 1e-5, 1.0),
    Constant("device.launch.collective", 8.0, 0.7),
    Constant("device.launch.backward", 1.3, 0.2),
    Constant("device.launch.power", 6.0, 0.5),
    Constant("device.dispatch_s", 5e-3, 1.0),
    Constant("device.optimizer.kernels", 1.0, 1.0),
    Constant("device.pp.scatter", 0.5, 0.7, 1.0),
    Constant("class.dp", 1.0, 0.5),
)
"""What Megatron-DeepSpeed adds, believed beforehand: hosts that launch slowly, scores written some times a pass."""

GIVEN = {
    # Kernels are queued; a softmax is fused where sequences × heads are a multiple of 4 (megatron/fused_kernels).
    "launch.ahead": 1.0,
    "attention.multiple": 4.0,
    # Batched products of whole score matrices, not tiles: no start, no diagonal, two products for one backward.
    "attention.backward": 2.0,
    "attention.start_s": 0.0,
    "attention.half_tokens": 0.0,
}


@dataclass(frozen=True, slots=True)
class Run:
    """One measured iteration."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    seq_len: int
    tp: int
    dp: int
    pp: int
    seconds: float

    @classmethod
    def read(cls, path: Path) -> list[Run]:
        """All rows of a table."""
        names = [name for name in cls.__slots__ if name != "seconds"]
        with path.open(encoding="utf-8", newline="") as file:
            return [
                cls(**{name: int(row[name]) for name in names}, seconds=float(row["iteration_ms"]) / 1e3)
                for row in csv.DictReader(file)
            ]

    @property
    def spec(self) -> ModelSpec:
        """The model: GPT-2's shape with Megatron's vocabulary."""
        return ModelSpec(
            "gpt2", self.layers, self.hidden, self.heads, self.heads, self.hidden // self.heads, 4 * self.hidden,
            VOCABULARY, tied_embeddings=True, dtype="fp16", gated=False, biases=True, learned_positions=True,
            max_positions=self.seq_len,
        )  # fmt: skip

    @property
    def measured(self) -> Measured:
        """The run as the cost model takes it. Megatron places pp outermost: its neighbours are tp × dp devices away."""
        candidate = Candidate(TRAINING, Layout(self.tp, self.pp), self.dp, self.micro_batch, recompute="full")
        rows, group = Rows.of([candidate], self.layers, NODE), self.tp * self.dp
        rows = replace(
            rows,
            pp_spans=np.array([self.pp > 1 and group * self.pp > NODE]),
            dp_spans=np.array([self.dp > 1 and group > NODE]),
        )
        tokens = Lengths.constant(self.seq_len)
        workload = Workload(self.global_batch, 1, Lengths.constant(0), tokens, self.global_batch, self.seq_len)
        return Measured(self.spec, rows, workload, np.array([self.seconds]))

    @property
    def setting(self) -> tuple[int, ...]:
        """What a user gives; the rest is the plan."""
        return self.gpus, self.global_batch, self.hidden, self.layers


@dataclass(frozen=True, slots=True)
class Test:
    """Predicted seconds of runs that nothing was fitted on."""

    runs: Sequence[Run]
    seconds: Floats

    @property
    def ratios(self) -> Floats:
        """Predicted over measured."""
        return self.seconds / measured_s(self.runs)

    @property
    def mape(self) -> float:
        """Mean error in percent."""
        return 100 * float(np.abs(self.ratios - 1).mean())

    def by(self, name: str) -> dict[str, str]:
        """Runs, mean error and mean bias in percent by a column."""
        values, found = np.array([getattr(run, name) for run in self.runs]), {}
        for value in np.unique(values):
            ratios = self.ratios[values == value]
            error, bias = 100 * np.abs(ratios - 1).mean(), 100 * np.log(ratios).mean()
            found[str(value)] = f"{len(ratios)} runs, error {error:.1f}, bias {bias:+.1f}"
        return found


def measured_s(runs: Sequence[Run]) -> Floats:
    """Their seconds."""
    return np.array([run.seconds for run in runs])


def start() -> Site:
    """An A100-80 node as its file has it, and what is given of the framework."""
    cluster = machine("a100-80x8")
    (kind,) = cluster.kinds.values()
    rates = Rates.of(kind, "fp16")
    rates = replace(rates, constants=tuple(sorted(({**rates.named, **GIVEN}).items())))
    return Site(rates, cluster.links["intra"], cluster.links["inter"], Calibration())


def constants(site: Site) -> list[Constant]:
    """All that is fitted, the machine's own constants from its file."""
    known = []
    for name, spread in KNOWN.items():
        where, constant = name.split(".", 1)
        link = {"intra": site.intra, "inter": site.inter}.get(where)
        value = site.rates[constant] if link is None else getattr(link, constant, None) or link.constants[constant]
        known.append(Constant(name, float(value), spread, 1.0 if constant.endswith("share") else np.inf))
    return [*known, *FRAMEWORK]


def fitted(runs: Sequence[Run]) -> Fit:
    """The model calibrated on some runs."""
    site = start()
    return fit([run.measured for run in runs], site, constants(site))


def tested(found: Fit, runs: Sequence[Run]) -> Test:
    """Its predictions of others."""
    return Test(runs, predict([run.measured for run in runs], found.site))


def draw(pools: Sequence[tuple[Sequence[Run], int]]) -> Iterator[tuple[Fit, Test]]:
    """Fits on so many random runs of each pool, and tests on what is left of the last pool, one a seed."""
    for seed in range(DRAWS):
        random = np.random.default_rng(seed)
        used, rest = list[Run](), list[Run]()
        for runs, count in pools:
            order = random.permutation(len(runs))
            used += [runs[i] for i in order[:count]]
            rest = [runs[i] for i in order[count:]]
        found = fitted(used)
        yield found, tested(found, rest)


def run(data: Path) -> list[Result]:
    """Every line of this part."""
    single = Run.read(data / "measured" / "vtrain_single_node_iteration_time.csv")
    multi = Run.read(data / "measured" / "vtrain_multi_node_iteration_time.csv")
    alone, across = list(draw([(single, 72)])), list(draw([(single, 72), (multi, 24)]))
    lines = [
        _held_out("one node, fitted on 72 runs", 6.6, [test for _, test in alone]),
        _held_out("across nodes, fitted on 72 + 24 runs", 8.2, [test for _, test in across]),
        *(_held_out(f"one node, fitted on {count} runs", None, [t for _, t in draw([(single, count)])])
          for count in (18, 144)),
        _widths(single),
        *_choice([test for _, test in alone]),
        *_against("one node", 4.0, [test for _, test in alone]),
        *_against("across nodes", 1.5, [test for _, test in across]),
    ]  # fmt: skip
    return lines


def _held_out(name: str, limit: float | None, tests: Sequence[Test]) -> Result:
    errors = [test.mape for test in tests]
    middle = tests[int(np.argsort(errors)[len(errors) // 2])]
    far = np.abs(middle.ratios - 1)
    notes = (
        f"{len(middle.runs)} runs, median of {len(tests)} draws ({min(errors):.1f} to {max(errors):.1f}); "
        f"median error {100 * np.median(far):.1f}, p95 {100 * np.quantile(far, 0.95):.1f}"
    )
    details = {column: middle.by(column) for column in ("tp", "pp", "dp", "micro_batch", "hidden")}
    line = at_most(f"vTrain {name}, MAPE %", limit or np.inf, float(np.median(errors)), notes=notes, details=details)
    return line if limit else replace(line, target="report", met=None)


def _widths(single: Sequence[Run]) -> Result:
    found = fitted([run for run in single if run.hidden == 1024])
    test = tested(found, [run for run in single if run.hidden == 2048])
    details = {column: test.by(column) for column in ("tp", "pp", "micro_batch")}
    notes = f"{len(test.runs)} runs; bias {100 * np.log(test.ratios).mean():+.1f}"
    return at_most("vTrain fitted on hidden 1024, tested on 2048, MAPE %", 20, test.mape, notes=notes, details=details)


def _choice(tests: Sequence[Test]) -> list[Result]:
    """Which of the measured plans of a setting would be chosen, and how far that is from the best of them.

    Plans that the draw was fitted on are no candidates; of a setting at least four others must be left.
    """
    shares = np.array([_hits(test) for test in tests])
    best, first, third = (float(100 * np.median(column)) for column in shares.T[:3])
    notes = f"{int(np.median(shares[:, 3]))} settings, fitted plans left out; the other side is the rule of thumb"
    name = "vTrain {} within 5 % of the best, % of settings"
    return [
        Result(name.format("choice"), ">= 5 points above", first, best, met=first - best >= 5, notes=notes),
        at_least(name.format("best of the three predicted fastest"), 90, third, baseline=best, notes=notes),
    ]


def _hits(test: Test) -> tuple[float, float, float, int]:
    """Shares of the settings for the rule of thumb, our choice and our best three; how many settings."""
    settings: dict[tuple[int, ...], list[int]] = {}
    for index, each in enumerate(test.runs):
        settings.setdefault(each.setting, []).append(index)
    groups = [np.array(group) for group in settings.values() if len(group) >= 4]
    rule = np.array([10 * each.tp + each.pp + 0.01 / each.micro_batch for each in test.runs])
    seconds = measured_s(test.runs)
    choices = ((rule, 1), (test.seconds, 1), (test.seconds, 3))
    of_rule, first, third = (_near(groups, seconds, order, count) for order, count in choices)
    return of_rule, first, third, len(groups)


def _near(groups: Sequence[Ints], seconds: Floats, order: Floats, count: int) -> float:
    """Share of the settings in which one of the `count` plans that `order` puts first is within 5 % of the best."""
    hits = [seconds[group[np.argsort(order[group])[:count]]].min() <= 1.05 * seconds[group].min() for group in groups]
    return float(np.mean(hits))


def _against(name: str, limit: float, tests: Sequence[Test]) -> list[Result]:
    """llm-analysis on the same runs: the better of its two answers, its one scale fitted on the very runs tested."""
    title, target = f"vTrain {name}, MAPE % against llm-analysis", f"ratio >= {limit:g}"
    if not LLM_ANALYSIS.exists():
        return [Result(title, target, float("nan"), notes=f"not measured: {LLM_ANALYSIS} does not exist")]
    ours, theirs = [test.mape for test in tests], [_baseline(test.runs) for test in tests]
    ratio = float(np.median(np.array(theirs) / ours))
    notes = f"medians of {len(tests)} draws"
    return [Result(title, target, float(np.median(ours)), float(np.median(theirs)), ratio, ratio >= limit, notes)]


def _baseline(runs: Sequence[Run]) -> float:
    asked = [{**asdict(run), "vocabulary": VOCABULARY, "gpu": "a100-sxm-80gb"} for run in runs]
    answer = subprocess.run(
        [str(LLM_ANALYSIS), "-P", str(BASELINE)], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    found, measured = np.array(json.loads(answer.stdout), dtype=float).T, measured_s(runs)
    scales = np.geomspace(0.2, 5.0, 400)
    return min(100 * float(np.abs(scales[:, None] * each / measured - 1).mean(axis=1).min()) for each in found)


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the measured tables")
    parser.add_argument("--json", type=Path, help="also write the lines there")
    settings = parser.parse_args()
    lines = run(settings.data)
    for line in lines:
        met = {True: "met", False: "MISSED", None: ""}[line.met]
        print(f"{line.name:70s} {line.target:8s} {line.measured:7.2f} {met:7s} {line.notes}")
        for column, found in line.details.items() if line.met is False else ():
            print(f"    {column}: {found}")
    if settings.json:
        settings.json.write_text(json.dumps([line.as_json for line in lines], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
