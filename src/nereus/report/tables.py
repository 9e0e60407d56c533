"""Tables for a terminal: an answer of the planner that explains itself (D7.7)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypedDict

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table

from nereus.core import Rejection
from nereus.core.sizes import show_bytes, show_seconds
from nereus.planning.search import SearchResult
from nereus.report import close
from nereus.report.answer import IMPORTED, PINNED, Answer, Comparison
from nereus.report.views import CLASSES, CallView, MemoryView, PlanView, StageView

CLOSE = ("step s", "slower by", "what differs")
WHOLE = ("model-stage", "call", "of", "step s", "slower by")
"""Columns of names and numbers, which are never wrapped."""
EXAMPLES = 3
"""Refused candidates that are named for each reason; the others are counted."""
TERMS = 2
"""Contents of a device's memory that are named; the others are summed."""
FULLEST = 6
"""Groups of devices whose memory is shown, the fullest first."""


def answer(shown: Answer, assumptions: Sequence[str] = (), notes: Sequence[str] = ()) -> RenderableType:
    """The best plan by model-stage, call and devices; what came close, what was refused, what would help."""
    parts: list[RenderableType] = [f"assumed: {escape(line)}" for line in assumptions]
    parts += [f"note: {escape(line)}" for line in notes]
    if shown.comparison is not None:
        parts += _comparison(shown.comparison)
    if shown.best is not None and not (shown.comparison and shown.comparison.shows(shown.best)):
        pinned = shown.comparison is not None and shown.comparison.own == PINNED
        parts += plan(shown.best, "plan with the pins" if pinned else "plan")
    if shown.comparison is not None:
        parts += _difference(shown.comparison)
    if shown.result is not None:
        parts.append(f"{shown.result.considered:,} candidates of its model-stages were priced; {bound(shown.result)}")
    parts += [_close(title, found) for title, found in beside(shown)]
    if shown.result is not None and shown.result.refused:
        parts.append(_refused(shown.result.refused))
    if shown.advice:
        parts.append("what would help:" if shown.best is None else "what would make the step shorter:")
        parts += [f"  {escape(line.describe())}" for line in shown.advice]
    return Group(*parts)


def bound(result: SearchResult) -> str:
    """What is proven of all other plans."""
    if result.bound_s is None:
        return "the best plan fits only judged device by device: others like it may be faster"
    return f"no plan whose fullest pp ranks fit together is below {show_seconds(result.bound_s)} s a step"


def plan(view: PlanView, title: str) -> list[RenderableType]:
    """Layouts, calls and memory of one plan."""
    return [
        _layouts(view.stages, title),
        f"predicted step {show_seconds(view.step_s)} s, give or take {view.uncertainty:.0%}; {escape(view.limited_by)}",
        _calls(view.calls),
        _memory(view.memory),
    ]


class Refusal(TypedDict):
    """Candidates refused for one reason."""

    reason: str
    count: int
    examples: list[str]


def grouped(refused: Collection[Rejection]) -> list[Refusal]:
    """Refused candidates by reason, the most frequent first, with a few examples."""
    by_reason: dict[str, list[Rejection]] = {}
    for rejection in refused:
        by_reason.setdefault(rejection.reason, []).append(rejection)
    counts = {reason: sum(each.count for each in alike) for reason, alike in by_reason.items()}
    ranked = sorted(by_reason.items(), key=lambda entry: -counts[entry[0]])
    return [
        Refusal(reason=reason, count=counts[reason], examples=[each.plan for each in alike[:EXAMPLES]])
        for reason, alike in ranked
    ]


def options(stage: StageView) -> str:
    """What a layout has beside its tp, pp and dp, as far as it differs from none."""
    degrees = {"cp": stage.cp, "ep": stage.ep, "vpp": stage.vpp}
    words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    words += [f"zero{stage.zero}"] * bool(stage.zero) + ["sp"] * stage.sequence_parallel
    words += [f"recompute {stage.recompute}"] * (stage.recompute != "none") + ["offload"] * stage.offload
    words += [f"KV {show_bytes(stage.kv_bytes)}"] * bool(stage.kv_bytes)
    return ", ".join(words)


def contents(row: MemoryView) -> str:
    """What makes a device's peak, the largest first."""
    parts = {f"{name} stored": size for name, size in row.stored.items()}
    parts |= {f"{row.call}: {name}": size for name, size in row.added.items()}
    ranked = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    named = [f"{name} {show_bytes(size)}" for size, name in ranked[:TERMS]]
    rest = sum(size for size, _ in ranked[TERMS:])
    return ", ".join([*named, *([f"{show_bytes(rest)} more"] if rest else [])])


def mostly(classes: Mapping[str, float]) -> str:
    """The operation class that most of a call's time goes to, with its share."""
    if not classes:
        return ""
    name = max(classes, key=classes.__getitem__)
    return f"{CLASSES.get(name, name)} {classes[name] / max(sum(classes.values()), 1e-12):.0%}"


def verdict(found: Comparison) -> str:
    """On the plan that the asker has, beside the best one."""
    words = f"{found.own}: {found.verdict}"
    if found.view is not None:
        words += f"; {show_seconds(found.view.step_s)} s a step"
    if found.better is found.view and found.fits:
        return f"{words}, no faster plan was found"
    if found.slower is None or found.other is None:
        return words
    more = "more" if found.slower >= 0 else "less"
    return f"{words}, {abs(found.slower):.1%} {more} than the best plan ({show_seconds(found.other.step_s)} s)"


def _comparison(found: Comparison) -> list[RenderableType]:
    """The verdict on the plan that the asker has."""
    parts: list[RenderableType] = [escape(verdict(found))]
    if found.reason:
        parts.append(escape(found.reason))
    if found.view is not None and found.own == IMPORTED:
        parts += plan(found.view, found.own)
    return parts


def _difference(found: Comparison) -> list[RenderableType]:
    """What the best plan does otherwise; without pins it is shown in short, or in full where no pinned one fits."""
    parts: list[RenderableType] = []
    if found.other is None or found.better is not found.other:
        return parts
    if found.own == PINNED and found.view is None:
        return plan(found.other, "best plan without pins")
    if found.own == PINNED:
        parts.append(
            _layouts(found.other.stages, f"best plan without pins, {show_seconds(found.other.step_s)} s a step")
        )
    if found.calls:
        table = _table("where they differ", "call", f"{found.own} s", "best plan s", "difference s")
        for call, own, other in found.calls:
            table.add_row(call, show_seconds(own), show_seconds(other), f"{other - own:+.3g}")
        parts.append(table)
        parts.append(f"to the best plan: {escape(found.changes)}")
    return parts


def _layouts(stages: Sequence[StageView], title: str) -> Table:
    table = _table(title, "model-stage", "tp", "pp", "dp", "micro-batch", "with", "devices", "s", "stored + added")
    for stage in stages:
        degrees = (stage.tp, stage.pp, stage.dp, stage.micro_batch)
        size = f"{show_bytes(stage.stored_bytes)} + {show_bytes(stage.added_bytes)}"
        table.add_row(
            stage.model_stage,
            *map(str, degrees),
            options(stage),
            escape(stage.where),
            show_seconds(stage.seconds),
            size,
        )
    return table


def _calls(calls: Sequence[CallView]) -> Table:
    """What limits the step: the calls on its critical path, the others beside it."""
    table = _table("step", "call", "of", "starts s", "takes s", "on the critical path", "mostly")
    for call in calls:
        times = (show_seconds(call.start_s), show_seconds(call.seconds))
        table.add_row(call.call, call.model_stage, *times, "yes" if call.critical else "", mostly(call.classes))
    return table


def _memory(rows: Sequence[MemoryView]) -> Table:
    table = _table("memory of one device", "devices", "how many", "peak", "of usable", "what makes it")
    for row in rows[:FULLEST]:
        share = f"{row.share:.0%} of {show_bytes(row.usable_bytes)}"
        table.add_row(escape(row.where), f"{row.count:,}", show_bytes(row.peak_bytes), share, escape(contents(row)))
    if len(rows) > FULLEST:
        rest = rows[FULLEST:]
        peaks = f"{show_bytes(rest[-1].peak_bytes)} to {show_bytes(rest[0].peak_bytes)}"
        shares = f"{rest[-1].share:.0%} to {rest[0].share:.0%}"
        count = sum(row.count for row in rest)
        table.add_row(f"{count:,} others in {len(rest)} group{'s' * (len(rest) > 1)}", "", peaks, shares, "")
    return table


def beside(shown: Answer) -> Iterator[tuple[str, list[close.Row]]]:
    """Title and rows of the plans that are shown beside the best, as far as there are any."""
    if shown.runners_up:
        yield "plans that came close", list(close.rows(shown.runners_up))
    if shown.alternatives:
        yield "best plans with another TP of the heaviest model-stages", list(map(close.row, shown.alternatives))


def _close(title: str, rows: Sequence[close.Row]) -> Table:
    table = _table(title, *CLOSE)
    for seconds, slower, what in rows:
        table.add_row(seconds, slower, escape(what.replace("; ", "\n")))
    return table


def _refused(refused: Collection[Rejection]) -> Table:
    table = _table("refused", "why", "how many", "for example")
    for entry in grouped(refused):
        table.add_row(escape(entry["reason"]), f"{entry['count']:,}", escape("\n".join(entry["examples"])))
    return table


def _table(title: str, *columns: str) -> Table:
    """Narrow columns wrap, but for names: one that is torn apart is hard to read."""
    made = (Column(name, overflow="fold", no_wrap=name in WHOLE) for name in columns)
    return Table(*made, title=title, title_justify="left")
