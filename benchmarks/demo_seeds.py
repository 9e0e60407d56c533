"""The demo under several seeds, then once with opportunistic changes refused: what each run learned and changed.

    python -m benchmarks.demo_seeds [--seeds 0 1 2 3 4] [--set run.steps=4]

Each seed has models of its own (built into build/tiny-SEED) and seeds the job. Runs go one after another, each a
`nereus train` process; the tally is read from the record it leaves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nereus.core import Adapt
from nereus.report.history import History
from nereus.report.recorders.jsonl import METRICS, read
from nereus.report.summary import Summary, summarise

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "examples" / "ppo_counting.yaml"
ROLES = ("actor", "reference", "reward", "critic")
MIN_GAIN, MIN_LENGTH, MIN_STEPS = 3.0, 35.0, 60


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the demo. `reshaped` counts model-stages that got another tp or pp."""

    name: str
    wall_s: float
    summary: Summary
    reshaped: int
    extends: int
    destroys: int

    @property
    def gain(self) -> float:
        """Held-out score of the last five evaluations over the first five."""
        ends = self.summary.verifier
        return ends.last / ends.first if ends is not None and ends.first > 0 else 0.0

    @property
    def length(self) -> float:
        """Mean response tokens of the last five steps."""
        return self.summary.length.last if self.summary.length is not None else 0.0

    def missed(self) -> list[str]:
        """The criteria that it does not meet."""
        met = {
            f"steps >= {MIN_STEPS}": self.summary.steps >= MIN_STEPS,
            f"gain >= {MIN_GAIN:g}": self.gain >= MIN_GAIN,
            f"length >= {MIN_LENGTH:g}": self.length >= MIN_LENGTH,
            "tp/pp change": self.reshaped > 0,
            "Extend": self.extends > 0,
            "Destroy": self.destroys > 0,
            "urgent": self.summary.urgent > 0,
            "opportunistic": self.summary.opportunistic > 0,
        }
        return [name for name, holds in met.items() if not holds]


def history_of(run_dir: Path) -> History:
    """What a run recorded."""
    history = History()
    (recording,) = read(run_dir)
    history.begin(recording.state)
    for entry in recording.entries:
        history.record(entry.boundary, entry.seen, entry.triggers, entry.decision, entry.outcome)
    for line in (run_dir / METRICS).read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        history.metrics(values.pop("step"), values)
    return history


def tally(name: str, wall_s: float, history: History) -> Run:
    """One run's figures."""
    reshaped, kinds = 0, []
    for tick in history.ticks:
        decision, outcome = tick.entry.decision, tick.entry.outcome
        if isinstance(decision, Adapt) and outcome is not None and outcome.completed:
            after = decision.proposal.plan
            reshaped += sum(
                tick.plan.of(ms).candidate.layout != after.of(ms).candidate.layout for ms in after.model_stages
            )
            kinds += [primitive.name for primitive in decision.proposal.dag.primitives]
    return Run(name, wall_s, summarise(history), reshaped, kinds.count("Extend"), kinds.count("Destroy"))


def run(name: str, seed: int, overrides: Sequence[str], folder: Path) -> Run | None:
    """Build the seed's models unless they exist, train, read the record. None when the run failed."""
    models, run_dir = ROOT / "build" / f"tiny-{seed}", folder / name
    builder = [
        sys.executable,
        str(ROOT / "examples" / "make_tiny_models.py"),
        "--out",
        str(models),
        "--seed",
        str(seed),
    ]
    subprocess.run(builder, check=True)
    settings = {f"models.{role}": models / role for role in ROLES} | {"run.seed": seed, "run.directory": run_dir}
    sets = [f"{key}={value}" for key, value in settings.items()] + list(overrides)
    command = [str(Path(sys.executable).with_name("nereus")), "train", str(JOB)]
    began_s = time.monotonic()
    ended = subprocess.run([*command, *(part for each in sets for part in ("--set", each))], check=False)
    if ended.returncode:
        print(f"{name}: ended with exit code {ended.returncode}", flush=True)
        return None
    return tally(name, time.monotonic() - began_s, history_of(run_dir))


def table(runs: Sequence[Run]) -> str:
    """One line a run."""
    heads = (
        "run",
        "steps",
        "wall s",
        "held-out score",
        "gain",
        "length",
        "tp/pp",
        "Extend",
        "Destroy",
        "urgent",
        "opp.",
    )
    rows = [heads]
    for each in runs:
        ends = each.summary.verifier
        rows.append(
            (
                each.name,
                str(each.summary.steps),
                f"{each.wall_s:.0f}",
                f"{ends.first:.3f} → {ends.last:.3f}" if ends is not None else "-",
                f"{each.gain:.1f}x",
                f"{each.length:.1f}",
                str(each.reshaped),
                str(each.extends),
                str(each.destroys),
                str(each.summary.urgent),
                str(each.summary.opportunistic),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    missed = ["", *("  all met" if not each.missed() else f"  missed: {', '.join(each.missed())}" for each in runs)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + note
        for row, note in zip(rows, missed, strict=True)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print; the tally so far is printed after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    folder = ROOT / "runs" / f"demo_seeds-{time.strftime('%Y%m%d-%H%M%S')}"
    planned = [(f"seed-{seed}", seed, options.overrides) for seed in options.seeds]
    planned.append((f"seed-{options.seeds[0]}-never", options.seeds[0], [*options.overrides, "admission.use=never"]))
    runs: list[Run] = []
    for name, seed, overrides in planned:
        made = run(name, seed, overrides, folder)
        if made is not None:
            runs.append(made)
            print(table(runs), flush=True)
    if len(runs) < len(planned):
        sys.exit(1)


if __name__ == "__main__":
    main()
