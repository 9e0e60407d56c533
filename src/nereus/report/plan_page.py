"""The planner's answer as one self-contained page: tables, and as pictures the timeline and the memory of devices."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nereus.core.sizes import show_bytes, show_seconds
from nereus.report import html, tables
from nereus.report.answer import IMPORTED, PINNED, Answer, Comparison
from nereus.report.html import BAR, GAP, LABEL, WIDTH
from nereus.report.views import CallView, MemoryView, PlanView

FULLEST = 40
"""Groups of devices in the memory picture."""


def page(shown: Answer, name: str, assumptions: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """HTML that needs nothing beside itself."""
    parts = [f"<h1>{escape(name)}</h1>"]
    parts += [f'<p class="note">assumed: {escape(line)}</p>' for line in assumptions]
    parts += [f'<p class="note">{escape(line)}</p>' for line in notes]
    if shown.best is None:
        parts.append(f'<p class="bad">{escape(shown.shortage)}</p>')
    if shown.comparison is not None:
        parts += _verdict(shown.comparison)
    if shown.best is not None and not (shown.comparison and shown.comparison.shows(shown.best)):
        pinned = shown.comparison is not None and shown.comparison.own == PINNED
        parts += plan(shown.best, "The plan with the pins" if pinned else "The best plan")
    if shown.comparison is not None:
        parts += _difference(shown.comparison)
    if shown.result is not None:
        parts.append(f"<p>Of all others: {escape(tables.bound(shown.result))}.</p>")
    for title, found in tables.beside(shown):
        parts += [f"<h2>{title[0].upper()}{title[1:]}</h2>", html.table(tables.CLOSE, found)]
    if shown.advice:
        title = "What would help" if shown.best is None else "What would make the step shorter"
        parts += [f"<h2>{title}</h2>", "<ul>", *(f"<li>{escape(a.describe())}</li>" for a in shown.advice), "</ul>"]
    if shown.result is not None and shown.result.refused:
        rows = ((r["reason"], str(r["count"]), "; ".join(r["examples"])) for r in tables.grouped(shown.result.refused))
        parts += ["<h2>Refused</h2>", html.table(("why", "how many", "for example"), rows)]
    return html.page(name, parts)


def plan(view: PlanView, title: str) -> list[str]:
    """Layouts, timeline and memory of one plan."""
    rows = (
        (
            s.model_stage,
            *map(str, (s.tp, s.pp, s.dp, s.micro_batch)),
            tables.options(s),
            s.where,
            show_seconds(s.seconds),
            f"{show_bytes(s.stored_bytes)} + {show_bytes(s.added_bytes)}",
        )
        for s in view.stages
    )
    columns = ("model-stage", "tp", "pp", "dp", "micro-batch", "with", "devices", "seconds", "stored + added")
    step = f"predicted step {show_seconds(view.step_s)} s, give or take {view.uncertainty:.0%}; {view.limited_by}"
    return [
        f"<h2>{escape(title)}</h2>",
        f"<p>{escape(step)}</p>",
        html.table(columns, rows),
        "<h3>One step</h3>",
        '<p class="note">A dark edge: on the critical path. Under the pointer: seconds by class.</p>',
        timeline(view),
        "<h3>Memory of one device</h3>",
        '<p class="note">At its peak. Dashed: what may be used; solid: what the device has.</p>',
        memory(view.memory, [stage.model_stage for stage in view.stages]),
    ]


def timeline(view: PlanView) -> str:
    """A bar for every call, a line between partitions; calls on the critical path have a dark edge."""
    partitions = {stage.model_stage: stage.partition for stage in view.stages}
    rank = {call.call: partitions.get(call.model_stage, len(partitions)) for call in view.calls}
    lanes = sorted(view.calls, key=lambda call: (rank[call.call], call.start_s))
    names = list(dict.fromkeys((*(s.model_stage for s in view.stages), *(call.model_stage for call in view.calls))))
    scale = (WIDTH - LABEL - 70) / max(view.step_s, 1e-12)
    shapes = []
    for index, call in enumerate(lanes):
        y = index * (BAR + GAP)
        if index and rank[call.call] != rank[lanes[index - 1].call]:
            shapes.append(f'<line x1="0" x2="{WIDTH}" y1="{y - GAP / 2}" y2="{y - GAP / 2}" stroke="#bbb"/>')
        x, width = LABEL + call.start_s * scale, max(call.seconds * scale, 1.0)
        shapes.append(html.text(0, y, f"{call.call} ({call.model_stage})"))
        fill = html.colour(names, call.model_stage)
        shapes.append(html.bar(x, y, width, fill, _about(call), call.critical))
        shapes.append(html.text(x + width + 4, y, f"{show_seconds(call.seconds)} s"))
    return html.svg(len(lanes), shapes)


def memory(rows: Sequence[MemoryView], model_stages: Sequence[str] = ()) -> str:
    """A bar for every group of equal devices: what is stored by model-stage, what a call adds, what may be used.

    `model_stages` have the colours that the timeline gives them.
    """
    shown = rows[:FULLEST]
    held = [name for row in shown for name, size in (*row.stored.items(), *row.added.items()) if size]
    names = list(dict.fromkeys((*model_stages, *held)))
    largest = max(max(row.capacity_bytes, row.peak_bytes) for row in shown)
    scale = (WIDTH - LABEL - 130) / largest
    shapes = []
    for index, row in enumerate(shown):
        y, x = index * (BAR + GAP), float(LABEL)
        shapes.append(html.text(0, y, f"{row.where} ({row.count:,})"[:44]))
        parts = [(name, f"{name} stored", size) for name, size in row.stored.items()]
        parts += [(name, f"{row.call}: {name}", size) for name, size in row.added.items()]
        for name, words, size in (part for part in parts if part[2]):
            fill = html.colour(names, name)
            shapes.append(html.bar(x, y, size * scale, fill, f"{words} {show_bytes(size)}"))
            x += size * scale
        for limit, dash in ((row.usable_bytes, "4 3"), (row.capacity_bytes, "0")):
            at = LABEL + limit * scale
            shapes.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + BAR}" stroke="#222" stroke-dasharray="{dash}"/>'
            )
        end = LABEL + max(row.peak_bytes, row.capacity_bytes) * scale
        shapes.append(html.text(end + 6, y, f"{show_bytes(row.peak_bytes)}, {row.share:.0%}"))
    rest = f'<p class="note">{len(rows) - FULLEST} more groups, less full.</p>' if len(rows) > FULLEST else ""
    hint = '<p class="note">Dashed: what a plan may use; solid: capacity.</p>'
    return html.legend(names) + html.svg(len(shown), shapes) + rest + hint


def _verdict(found: Comparison) -> list[str]:
    """As the terminal has it: the verdict, and an imported configuration as a plan."""
    parts = [f"<h2>The {escape(found.own)}</h2>", f"<p>{escape(tables.verdict(found))}</p>"]
    if found.reason:
        parts.append(f'<p class="bad">{escape(found.reason)}</p>')
    if found.view is not None and found.own == IMPORTED:
        parts += plan(found.view, f"The {found.own} as a plan")
    return parts


def _difference(found: Comparison) -> list[str]:
    """What the best plan does otherwise."""
    parts: list[str] = []
    if found.other is None or found.better is not found.other:
        return parts
    if found.own == PINNED:
        parts += plan(found.other, "The best plan without pins")
    if found.calls:
        rows = ((call, show_seconds(own), show_seconds(best), f"{best - own:+.3g}") for call, own, best in found.calls)
        columns = ("call", f"{found.own} s", "best plan s", "difference s")
        parts += ["<h2>Where they differ</h2>", html.table(columns, rows)]
        parts.append(f"<p>To the best plan: {escape(found.changes)}</p>")
    return parts


def _about(call: CallView) -> str:
    classes = sorted(call.classes.items(), key=lambda entry: -entry[1])
    inside = ", ".join(f"{name} {show_seconds(seconds)} s" for name, seconds in classes if seconds)
    return f"{call.call}: {show_seconds(call.start_s)} to {show_seconds(call.end_s)} s; {inside}"
