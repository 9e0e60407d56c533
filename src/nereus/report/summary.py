"""The closing summary of a run: plans, predictions, transitions, decisions, learning, and how it was paced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from nereus.controller.changes import changes
from nereus.core import Adapt, Cluster, Decision, Keep, Plan, Restart
from nereus.report.decision import line
from nereus.report.history import History, Tick

ENDS = 5
"""How many first and last values are averaged to show what changed, at most: of a short series, half."""


@dataclass(frozen=True, slots=True)
class Period:
    """Steps that ran under one plan; predicted seconds are those made before each step's own timings were seen."""

    first_step: int
    last_step: int
    plan: str
    change: str
    """What differs from the plan before; empty for the first."""
    devices: int
    measured_s: float | None
    predicted_s: float | None


@dataclass(frozen=True, slots=True)
class Ends:
    """A series of the run: mean of its first `count` values and of its last."""

    first: float
    last: float
    count: int = ENDS

    @property
    def over(self) -> str:
        """What the two numbers are, in words."""
        return f"mean of the first and last {self.count}" if self.count > 1 else "first and last"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did. Times are means per step unless they say otherwise."""

    steps: int
    elapsed_s: float
    periods: tuple[Period, ...]
    prediction_error: float | None
    """Mean of |predicted / measured - 1| over all steps."""
    transitions: int
    transition_s: float
    """All transitions together."""
    urgent: int
    opportunistic: int
    kept: int
    restarts: int
    decisions: tuple[str, ...]
    verifier: Ends | None
    length: Ends | None
    speed: str

    @property
    def transition_share(self) -> float:
        """Share of the run spent in transitions."""
        return self.transition_s / self.elapsed_s if self.elapsed_s > 0 else 0.0


def summarise(history: History) -> Summary:
    """The summary of what was recorded."""
    ticks = history.ticks
    outcomes = [tick.entry.outcome for tick in ticks if tick.entry.outcome is not None and _moves(tick.entry.decision)]
    decided = [tick.entry for tick in ticks if tick.entry.triggers]
    adapted = [entry.decision for entry in decided if isinstance(entry.decision, Adapt)]
    errors = [abs(value) for _, value in history.series.get("nereus/prediction_error", ())]
    return Summary(
        steps=max((tick.entry.boundary.step for tick in ticks), default=0),
        elapsed_s=ticks[-1].entry.boundary.elapsed_s if ticks else 0.0,
        periods=_periods(history),
        prediction_error=fmean(errors) if errors else None,
        transitions=len(outcomes),
        transition_s=sum(outcome.seconds for outcome in outcomes),
        urgent=sum(decision.urgent for decision in adapted),
        opportunistic=sum(not decision.urgent for decision in adapted),
        kept=sum(isinstance(entry.decision, Keep) for entry in decided),
        restarts=sum(isinstance(entry.decision, Restart) for entry in decided),
        decisions=tuple(line(e.boundary, e.triggers, e.decision, e.outcome) for e in decided),
        verifier=_ends(history, "val/score"),
        length=_ends(history, "response_length/mean"),
        speed=speed_note(history.start.pool) if history.start is not None else "",
    )


def speed_note(cluster: Cluster) -> str:
    """How the devices are paced, in words (D5.11)."""
    speeds = sorted({kind.speed for kind in cluster.kinds.values()})
    if speeds == [1.0]:
        return "speed 1: devices are not paced"
    shares = ", ".join(f"{speed:g}" for speed in speeds)
    return f"speed {shares}: devices paced at {shares} of a core: not a benchmark"


def render(summary: Summary) -> RenderableType:
    """The summary for a terminal."""
    title = "plans over time (the first in full, then what changed)"
    plans = Table("steps", "plan", "devices", "step s", "predicted s", title=title, title_justify="left")
    for period in summary.periods:
        plans.add_row(
            f"{period.first_step}-{period.last_step}",
            escape((period.change or period.plan).replace("; ", "\n")),
            str(period.devices),
            _number(period.measured_s),
            _number(period.predicted_s),
        )
    return Group(plans, *facts(summary))


def facts(summary: Summary) -> list[str]:
    """The rest of the summary, one fact a line."""
    tally = f"adapt urgent {summary.urgent}, adapt opportunistic {summary.opportunistic}, keep {summary.kept}"
    lines = [
        f"steps: {summary.steps} in {summary.elapsed_s:.1f} s",
        f"decisions: {tally}" + (f", restart {summary.restarts}" if summary.restarts else ""),
        f"transitions that moved state: {summary.transitions}, {summary.transition_s:.2f} s, "
        f"{summary.transition_share:.1%} of the run",
    ]
    if summary.prediction_error is not None:
        lines.append(f"step time: predictions are off by {summary.prediction_error:.1%} on average")
    for name, ends in (("verifier score (held out)", summary.verifier), ("response length", summary.length)):
        if ends is not None:
            lines.append(f"{name}: {ends.first:.3g} → {ends.last:.3g} ({ends.over})")
    return [*lines, summary.speed]


def _periods(history: History) -> tuple[Period, ...]:
    """Neighbouring steps under the same plan."""
    runs: list[tuple[Plan, list[Tick]]] = []
    for tick in history.ticks:
        if tick.entry.seen.step_s is None:
            continue
        if not runs or runs[-1][0] != tick.plan:
            runs.append((tick.plan, []))
        runs[-1][1].append(tick)
    predicted = dict(history.series.get("nereus/predicted_step_s", ()))
    periods = []
    before: Plan | None = None
    for plan, ticks in runs:
        steps = [tick.entry.boundary.step for tick in ticks]
        measured = [tick.entry.seen.step_s for tick in ticks if tick.entry.seen.step_s is not None]
        expected = [predicted[step] for step in steps if step in predicted]
        change = "" if before is None else changes(before, plan)
        periods.append(
            Period(steps[0], steps[-1], plan.describe(), change, len(plan.devices), _mean(measured), _mean(expected))
        )
        before = plan
    return tuple(periods)


def _moves(decision: Decision) -> bool:
    """Whether a decision moved state, not only changed micro-batches or recompute modes."""
    return isinstance(decision, Adapt) and not decision.proposal.dag.idle


def _ends(history: History, name: str) -> Ends | None:
    values = [value for _, value in history.series.get(name, ())]
    count = min(ENDS, max(len(values) // 2, 1))  # no value is in both means
    return Ends(fmean(values[:count]), fmean(values[-count:]), count) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
